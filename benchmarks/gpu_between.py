"""What lies between the kernels of a decode step, on this GPU: fused against separate, each checked before it is timed.

    python benchmarks/gpu_between.py --json FILE

An 8B-shaped decoder layer without its attention, a Mixtral-like layer of experts, and every operation by itself, all
captured as CUDA graphs. Weights of a layer exceed the L2 cache or take turns. Needs transformers; about a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_linear import random_weight
from gpu_timing import L2_BYTES, graph_time
from torch import Tensor, nn

from kvconvert.kernels.elementwise import (
    Gate,
    Norm,
    add_rms_norm,
    gated,
    gated_reference,
    rms_norm,
    rms_norm_reference,
    rotary,
    rotary_reference,
)
from kvconvert.kernels.linear import QuantizedLinear, share_input
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight

HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, HEAD_SIZE, GROUP_SIZE = 4096, 14336, 32, 8, 128, 128
DTYPE = torch.bfloat16
BATCHES = (1, 32)
EXPERTS, PER_TOKEN = 8, 2
EXPERT_TOKENS = (1, 8, 32, 512)
LAYERS = 4
Case = tuple[str, Callable[[], dict]]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def timed(name: str, ours: list[Callable], peers: list[Callable], peer: str, error: float, tolerance: float) -> dict:
    """A row: both times, over buffers that take turns, and whether the check passed."""
    row = {"case": name, "error": error, "tolerance": tolerance, "passed": error <= tolerance, "peer": peer}
    if not row["passed"]:
        return row
    ours_us, peer_us = (graph_time(launches, repeats=10) * 1e6 for launches in (ours, peers))
    return row | {"ours_us": ours_us, "peer_us": peer_us, "ratio": peer_us / ours_us}


def packed(inputs: int, outputs: int, device: torch.device, seed: int) -> QuantizedLinear:
    weight = random_weight(inputs, outputs, GROUP_SIZE, device, seed)
    # Zeros in the middle of the range, and outputs of the size of the inputs.
    scales = torch.full_like(weight.scales, 1 / (4.6 * inputs**0.5))
    return QuantizedLinear.from_weight(AwqWeight(weight.qweight, torch.full_like(weight.qzeros, 0x77777777), scales))


def operations(device: torch.device) -> Iterator[Case]:
    """Each elementwise kernel against the operations of torch that transformers calls."""
    for batch in BATCHES:
        x, residual = (torch.randn(batch, 1, HIDDEN, device=device, dtype=DTYPE) for _ in range(2))
        weight = torch.rand(HIDDEN, device=device, dtype=DTYPE) + 0.5
        kind = Norm(1e-6)
        heads = torch.randn(batch, 1, HEADS, HEAD_SIZE, device=device, dtype=DTYPE)
        both = torch.randn(batch, 1, 2 * INTERMEDIATE, device=device, dtype=DTYPE)
        gate, up = both.chunk(2, -1)
        q = torch.randn(batch, 1, HEADS, HEAD_SIZE, device=device, dtype=DTYPE).transpose(1, 2)
        k = torch.randn(batch, 1, KEY_HEADS, HEAD_SIZE, device=device, dtype=DTYPE).transpose(1, 2)
        angles = torch.rand(batch, 1, HEAD_SIZE // 2, device=device).repeat(1, 1, 2) * 6
        cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)

        def separate_add_norm(x: Tensor, residual: Tensor, weight: Tensor, kind: Norm) -> tuple[Tensor, Tensor]:
            total = residual + x
            return rms_norm_reference(total, weight, kind), total

        cases: list[tuple[str, Callable, Callable, tuple]] = [
            ("RMSNorm of 4096", rms_norm, rms_norm_reference, (x, weight, kind)),
            ("RMSNorm of heads of 128", rms_norm, rms_norm_reference, (heads, weight[:HEAD_SIZE], kind)),
            ("residual and RMSNorm", add_rms_norm, separate_add_norm, (x, residual, weight, kind)),
            ("SiLU times up", gated, gated_reference, (gate, up, Gate("silu"))),
            ("GELU times up", gated, gated_reference, (gate, up, Gate("gelu_tanh"))),
            ("rotary positions", rotary, rotary_reference, (q, k, cos, sin)),
        ]
        for name, ours, peer, arguments in cases:
            yield f"{name}, batch {batch}", partial(operation, f"{name}, batch {batch}", ours, peer, arguments)


def operation(name: str, ours: Callable, peer: Callable, arguments: tuple) -> dict:
    found, expected = ours(*arguments), peer(*arguments)
    pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
    error = max(relative_error(a, b) for a, b in pairs)
    return timed(name, [partial(ours, *arguments)], [partial(peer, *arguments)], "torch eager", error, 2e-3)


def products(device: torch.device) -> Iterator[Case]:
    """q, k, v and gate, up: one product against one for each."""
    sizes = {"q, k, v": (HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE)}
    sizes["gate, up"] = (INTERMEDIATE, INTERMEDIATE)
    for kind, outputs in sizes.items():
        for batch in (1, 8, 32, 64):
            for biased in (False, True) if kind == "q, k, v" and batch in BATCHES else (False,):
                name = f"{kind}, {batch} rows{', biases' * biased}"
                yield name, partial(product, name, outputs, batch, biased, device)


def product(name: str, outputs: tuple[int, ...], rows: int, biased: bool, device: torch.device) -> dict:
    copies = 4 * L2_BYTES // (HIDDEN * sum(outputs) // 2) + 1
    alone, shared = [], []
    for seed in range(copies):
        linears = [packed(HIDDEN, size, device, seed + 100 * place) for place, size in enumerate(outputs)]
        for linear in linears if biased else []:
            linear.bias = torch.randn(linear.out_features, device=device, dtype=DTYPE)
        alone.append(linears)
        shared.append([QuantizedLinear.from_weight(one.awq_weight(), one.bias) for one in linears])
        reason = share_input(shared[-1])
        assert reason is None, reason
    x = torch.randn(rows, HIDDEN, device=device, dtype=DTYPE)

    def run(linears: list[QuantizedLinear]) -> list[Tensor]:
        return [linear(x) for linear in linears]

    exact = [x.double() @ dequantize_weight(one.awq_weight(), torch.float64).T for one in alone[0]]
    exact = [y if one.bias is None else y + one.bias.double() for y, one in zip(exact, alone[0], strict=True)]
    error = max(relative_error(y, right) for y, right in zip(run(shared[0]), exact, strict=True))
    # Views of the outputs, so that each replay's inputs stay where they were captured.
    return timed(
        name, [partial(run, one) for one in shared], [partial(run, one) for one in alone], "one by one", error, 4e-3
    )


def layers(device: torch.device) -> Iterator[Case]:
    for batch in BATCHES:
        yield f"layer without attention, batch {batch}", partial(layer, batch, device)


def layer(batch: int, device: torch.device) -> dict:
    """A Llama decoder layer whose attention hands back its queries: fused against as transformers runs it."""
    from transformers import LlamaConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from kvconvert.runtime.hf.fuse import fuse

    def no_attention(module, query, key, value, mask, **kwargs):
        # Values count, so that a wrong one shows.
        return query.transpose(1, 2) + value.repeat_interleave(HEADS // KEY_HEADS, 1).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["no attention"] = no_attention
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        attn_implementation="no attention",
    )
    config._attn_implementation = "no attention"
    stacks = []
    for fused in (False, True):
        with torch.device("meta"):
            stack = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(LAYERS)).eval()
        for index, one in enumerate(stack):
            for place, (name, linear) in enumerate(list(one.named_modules())):
                if isinstance(linear, nn.Linear):
                    made = packed(linear.in_features, linear.out_features, device, 100 * index + place)
                    one.set_submodule(name, made)
            for norm in (one.input_layernorm, one.post_attention_layernorm):
                norm.weight = nn.Parameter(torch.ones(HIDDEN, device=device, dtype=DTYPE), requires_grad=False)
        if fused:
            model = nn.Module()
            model.layers = stack
            print("  fused:", fuse(model.eval()))
        stacks.append(stack)
    x = torch.randn(batch, 1, HIDDEN, device=device, dtype=DTYPE)
    positions = LlamaRotaryEmbedding(config).to(device)(x, torch.arange(7, 7 + batch, device=device)[:, None])

    def run(stack: nn.ModuleList) -> Tensor:
        y = x
        for one in stack:
            y = one(y, position_embeddings=positions)
        return y

    expected, found = (run(stack) for stack in stacks)
    name = f"layer without attention, batch {batch}"
    row = timed(
        name, [partial(run, stacks[1])], [partial(run, stacks[0])], "not fused", relative_error(found, expected), 2e-2
    )
    return row | {key: row[key] / LAYERS for key in ("ours_us", "peer_us") if key in row}


def experts(device: torch.device) -> Iterator[Case]:
    made: dict[str, tuple] = {}

    def build() -> tuple[nn.Module, nn.Module]:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        from kvconvert.runtime.hf.experts import EXPERT_ROLES, PackedExperts

        config = MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_local_experts=EXPERTS,
            num_experts_per_tok=PER_TOKEN,
            experts_implementation="grouped_mm",
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            dense = MixtralExperts(config)
            module = PackedExperts(dense, EXPERT_ROLES[0], lambda i, o, bias: QuantizedLinear(i, o, GROUP_SIZE, bias))
        dense = dense.to_empty(device=device).to(DTYPE).requires_grad_(False)
        for number, expert in enumerate(module.experts()):
            for place, (name, linear) in enumerate(list(expert.items())):
                expert[name] = packed(linear.in_features, linear.out_features, device, 10 * number + place)
            gate, up, down = (dequantize_weight(expert[name].awq_weight(), DTYPE) for name in EXPERT_ROLES[0])
            dense.gate_up_proj[number, :INTERMEDIATE] = gate
            dense.gate_up_proj[number, INTERMEDIATE:] = up
            dense.down_proj[number] = down
        return module, dense

    for tokens in EXPERT_TOKENS:

        def run(tokens: int = tokens) -> dict:
            if "experts" not in made:
                made["experts"] = build()
            return routed(*made["experts"], tokens, device)

        yield f"experts, {tokens} tokens", run


def routed(module: nn.Module, dense: nn.Module, tokens: int, device: torch.device) -> dict:
    x = torch.randn(tokens, HIDDEN, device=device, dtype=DTYPE)
    scores, chosen = torch.rand(tokens, EXPERTS, device=device).topk(PER_TOKEN, -1)
    scores = (scores / scores.sum(-1, keepdim=True)).to(DTYPE)
    loop = super(type(module), module).forward(x, chosen, scores)
    error = relative_error(module(x, chosen, scores), loop)
    # The faster of transformers' implementations that can be captured.
    found = {}
    for implementation in ("grouped_mm", "batched_mm"):
        # That one copies an expert's weights for each pair.
        if implementation == "batched_mm" and tokens > 8:
            continue
        dense.config._experts_implementation = implementation
        try:
            found[implementation] = timed(
                f"experts, {tokens} tokens",
                [partial(module, x, chosen, scores)],
                [partial(dense, x, chosen, scores)],
                f"transformers, {implementation}, bf16",
                error,
                2e-2,
            )
            found[implementation]["error_of_peer"] = relative_error(dense(x, chosen, scores), loop)
        except Exception as problem:  # whatever it is, the other implementation may work
            print(f"  {implementation}: {type(problem).__name__}: {str(problem)[:200]}")
            torch.cuda.synchronize()
    if not found:
        ours = graph_time([partial(module, x, chosen, scores)], repeats=10) * 1e6
        return {"case": f"experts, {tokens} tokens", "error": error, "passed": error <= 2e-2, "ours_us": ours}
    return min(found.values(), key=lambda row: row.get("peer_us", float("inf")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="leave out the other sections")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_between.py needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 1
    device, begin = torch.device("cuda"), time.perf_counter()
    rows = []
    with torch.no_grad():
        for section in arguments.only or SECTIONS:
            for name, run in SECTIONS[section](device):
                try:
                    row = run()
                except Exception as problem:  # the other cases are worth having
                    traceback.print_exc()
                    row = {"case": name, "passed": False, "failed": f"{type(problem).__name__}: {problem}"[:500]}
                rows.append(row | {"section": section})
                print(f"{time.perf_counter() - begin:5.1f} s", json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    if arguments.json:
        gpu = torch.cuda.get_device_name(device)
        arguments.json.write_text(json.dumps({"gpu": gpu, "rows": rows}, indent=1) + "\n", encoding="utf8")
    return 0 if all(row["passed"] for row in rows) else 1


SECTIONS = {"products": products, "layer": layers, "experts": experts, "operations": operations}

if __name__ == "__main__":
    sys.exit(main())
