"""A small decoder layer with random weights, run the way the pipeline runs one, for tests of passes."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, AttentionSample, attention_observed, causal
from kvconvert.calibration.protocol import CalibrationPass, LayerWork, PassResult
from kvconvert.kernels.pages import LayerFormat, PageFormat
from kvconvert.models.structure import LayerStructure, Projection

STRUCTURE = LayerStructure(
    "self_attn",
    *map(Projection, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    output="self_attn.o_proj",
    norm_groups=(),
    pairs=(),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def cache_format(heads: int = 2, dim: int = 8, bits: int = 2, group: int = 32, **changes: object) -> LayerFormat:
    """Plain pages of 128 tokens."""
    keys = PageFormat.keys(heads, dim, 128, bits, group)
    return LayerFormat(keys, PageFormat.values(heads, dim, 128, bits, dim), **changes)


def layer_work(samples: int = 3, length: int = 20, **config: object) -> tuple[LayerWork, dict]:
    """A layer to work on, and what its attention will have seen once `run_pass` has run it."""
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, **config,
    )  # fmt: skip
    settings._attn_implementation = RECORDING_ATTENTION
    model = LlamaForCausalLM(settings).eval().requires_grad_(False)
    work = LayerWork("model.layers.0", model.model.layers[0], STRUCTURE, samples, length, torch.float32, cache_format())
    seen: dict = {"queries": [], "keys": [], "values": [], "model": model}
    seen["hidden"] = torch.randn(samples, length, 32)
    work.layer.seen = seen
    return work, seen


def run_layer(work: LayerWork) -> None:
    """All hidden states through the layer, two sequences at a time, recording what attention sees."""
    seen = work.layer.seen
    positions = torch.arange(work.seq_len)[None]
    embeddings = seen["model"].model.rotary_emb(seen["hidden"][:1], positions)

    def record(query, key, value):
        for name, tensor in (("queries", query), ("keys", key), ("values", value)):
            seen[name].append(tensor)

    with attention_observed(work.layer.self_attn, record):
        for batch in seen["hidden"].split(2):
            work.layer(batch, position_embeddings=embeddings, attention_mask=None)


def run_passes(passes: list[CalibrationPass], work: LayerWork) -> PassResult:
    """The four steps of the pipeline; the last pass's result."""
    for calibration in passes:
        calibration.prepare(work)
    with ExitStack() as hooks:
        for calibration in passes:
            hooks.enter_context(calibration.observe(work))
        run_layer(work)
    for calibration in passes:
        calibration.solve(work)
        calibration.apply(work)
    return passes[-1].result()


def random_sample(
    sequences: int = 2, query_heads: int = 4, heads: int = 2, tokens: int = 300, dim: int = 16, seed: int = 0
) -> AttentionSample:
    """Attention of independent normal queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> torch.Tensor:
        return torch.randn(sequences, n, tokens, dim, generator=generator)

    return AttentionSample(normal(query_heads), normal(heads), normal(heads), dim**-0.5, causal(tokens))
