"""A mixture's experts in a fixed number of launches equal experts computed one after another."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from tiny.weights import relative_error
from torch import Tensor

from kvconvert.kernels.device import fallbacks
from kvconvert.kernels.elementwise import Gate
from kvconvert.kernels.experts import (
    ExpertLinears,
    experts_reference,
    routed_experts,
    scored_experts,
    store_experts,
    unsupported,
)
from kvconvert.kernels.experts import triton as launch
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, quantize_weight

# Of five roundings one after another, which the interpreter does by truncation for bfloat16.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 3.5e-2}
pytestmark = pytest.mark.usefixtures("poisoned_memory")
HIDDEN, INTERMEDIATE = 64, 96
SILU = Gate("silu")
CLAMPED = Gate("silu", 1.702, 2.0, 1.0)


def linear(inputs: int, outputs: int, group_size: int, bias: bool, seed: int, device: torch.device) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = quantize_weight(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, 4, group_size)
    values = torch.randn(outputs, generator=generator).to(device, torch.bfloat16) if bias else None
    return QuantizedLinear.from_weight(AwqWeight(*(tensor.to(device) for tensor in weight)), values)


def make(
    experts: int, device: torch.device, group_size: int = 32, bias: bool = False, hidden: int = HIDDEN
) -> tuple[ExpertLinears, dict[str, Tensor]]:
    """Experts, and the reference's tensors for them."""
    made = [
        tuple(
            linear(*sizes, group_size, bias, 3 * number + part, device)
            for part, sizes in enumerate([(hidden, INTERMEDIATE)] * 2 + [(INTERMEDIATE, hidden)])
        )
        for number in range(experts)
    ]
    dense = [[dequantize_weight(part.awq_weight(), torch.float64) for part in expert] for expert in made]
    tensors = {
        "gate_up": torch.stack([torch.cat(parts[:2]) for parts in dense]),
        "down": torch.stack([parts[2] for parts in dense]),
    }
    if bias:
        tensors["gate_up_bias"] = torch.stack([torch.cat([gate.bias, up.bias]) for gate, up, _ in made]).double()
        tensors["down_bias"] = torch.stack([down.bias for _, _, down in made]).double()
    stored = store_experts(made)
    assert isinstance(stored, ExpertLinears), stored
    return stored, tensors


def routes(tokens: int, experts: int, per_token: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    scores, chosen = torch.rand(tokens, experts, generator=generator).topk(per_token, -1)
    return chosen.to(device), scores.to(device)


SIZES = [(1, 4, 2), (7, 5, 1)]
SIZES += [pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((3, 4, 2), (20, 3, 3), (90, 2, 1))]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "experts", "per_token"), SIZES)
@pytest.mark.parametrize(("kind", "bias"), [(SILU, False), (CLAMPED, True)])
def test_experts_equal_the_reference(device, dtype, tokens, experts, per_token, kind, bias):
    stored, tensors = make(experts, device, bias=bias)
    x = torch.randn(tokens, HIDDEN, generator=torch.manual_seed(1)).to(device, dtype)
    chosen, scores = routes(tokens, experts, per_token, device)
    y = routed_experts(x, chosen, scores.to(dtype), stored, kind)
    assert y.dtype == dtype
    exact = experts_reference(x.double(), chosen, scores.to(dtype).double(), kind=kind, **tensors)
    assert relative_error(y, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize(("group_size", "hidden"), [(32, 160), (96, 96)])
def test_other_sizes(device, group_size, hidden):
    if group_size == 96:
        reason = unsupported(torch.zeros(1, 96, device=device, dtype=torch.float16), "groups of 96", SILU)
        assert "groups of 96" in reason
        return
    stored, tensors = make(3, device, group_size, hidden=hidden)
    x = torch.randn(5, hidden, generator=torch.manual_seed(1)).to(device, torch.float16)
    chosen, scores = routes(5, 3, 2, device)
    exact = experts_reference(x.double(), chosen, scores.double(), kind=SILU, **tensors)
    assert relative_error(routed_experts(x, chosen, scores, stored, SILU), exact) < TOLERANCE[torch.float16]


def test_experts_without_a_gate(device):
    made = [
        (linear(HIDDEN, INTERMEDIATE, 32, False, number, device), linear(INTERMEDIATE, HIDDEN, 32, False, 9, device))
        for number in range(3)
    ]
    up, down = (
        torch.stack([dequantize_weight(part.awq_weight(), torch.float64) for part in parts])
        for parts in zip(*made, strict=True)
    )
    x = torch.randn(5, HIDDEN, generator=torch.manual_seed(1)).to(device, torch.float16)
    chosen, scores = routes(5, 3, 2, device)

    def squared(values: Tensor) -> Tensor:
        return values.relu().square()

    exact = experts_reference(x.double(), chosen, scores.double(), up, down, squared)
    y = routed_experts(x, chosen, scores, store_experts(made), squared)
    assert relative_error(y, exact) < TOLERANCE[torch.float16]


@pytest.mark.each_value
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("mean", [1.0, 40.0])
def test_every_kernel_skips_pairs_without_an_expert(device, monkeypatch, is_sorted, mean):
    stored, tensors = make(3, device)
    x = torch.randn(6, HIDDEN, generator=torch.manual_seed(1)).to(device, torch.float16)
    chosen, scores = routes(6, 3, 2, device)
    chosen[1, 0], chosen[2], chosen[4, 1] = 3, torch.tensor([3, 7]), -1
    monkeypatch.setattr(launch, "SORTED_FROM", 0.0 if is_sorted else 1e9)
    route = launch.route
    monkeypatch.setattr(launch, "route", lambda *args: route(*args[:3], mean))
    y = routed_experts(x, chosen, scores, stored, SILU)
    exact = experts_reference(x.double(), chosen, scores.double(), kind=SILU, **tensors)
    assert not y[2].any()
    assert relative_error(y, exact) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("pairs", [1, 7, launch.SORT_CHUNK + 5])
def test_pairs_are_sorted_by_expert_in_order(device, pairs, monkeypatch):
    monkeypatch.setattr(launch, "SORTED_FROM", 0.0)
    chosen = torch.randint(-1, 6, (pairs,), generator=torch.Generator().manual_seed(pairs)).to(device)
    routing = launch.route(chosen, 5, pairs + 1, pairs / 5)
    for expert in range(5):
        start, count = int(routing.starts[expert]), int(routing.counts[expert])
        found = routing.order[start : start + count].tolist()
        assert found == (chosen == expert).nonzero().flatten().tolist()
    assert int(routing.starts[0]) == 0
    assert int(routing.starts[4] + routing.counts[4]) == int(((chosen >= 0) & (chosen < 5)).sum())


@pytest.mark.parametrize("tokens", [1, 9])
def test_scores_may_have_been_applied_before(device, tokens):
    stored, tensors = make(3, device)
    x = torch.randn(tokens, HIDDEN, generator=torch.manual_seed(1)).to(device, torch.float16)
    chosen, scores = routes(tokens, 3, 1, device)
    applied = torch.zeros(tokens, 3, device=device).scatter_(1, chosen, scores).T.reshape(-1, 1)
    routed = (x.repeat(3, 1) * applied).half()
    numbers = torch.arange(3, device=device).repeat_interleave(tokens)[:, None]
    exact = experts_reference(routed.double(), numbers, None, kind=SILU, **tensors)
    y = scored_experts(routed, stored, SILU)
    assert relative_error(y, exact) < TOLERANCE[torch.float16]
    assert not y[~routed.any(-1)].any()


def test_what_is_not_served_is_named(device):
    stored, _ = make(2, device)
    x = torch.zeros(1, HIDDEN, device=device)
    assert "float32" in unsupported(x, stored, SILU)
    assert "activation" in unsupported(x.half(), stored, None)
    assert "gradients" in unsupported(x.half().requires_grad_(), stored, SILU)
    assert unsupported(x.half(), stored, SILU) is None
    odd = [tuple(linear(64, outputs, 32, False, 1, device) for outputs in (40, 40, 64)) for _ in range(2)]
    assert "multiple of 32" in store_experts(odd)


MIXTURES = ["mixtral"]
MIXTURES += [pytest.param(name, marks=pytest.mark.full) for name in ("gpt_oss", "llama4_text", "deepseek_v3")]


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_a_models_experts_take_the_kernels_and_a_copy_does(name, device, monkeypatch):
    from tiny.mixtures import tiny_mixture

    from kvconvert.models.experts import EXPERT_ROLES, SeparateExperts, is_fused, split_fused
    from kvconvert.runtime.hf import fused_modules as runtime

    model = tiny_mixture(name)
    for layer in model.model.layers:
        for place, fused in [(place, module) for place, module in layer.named_modules() if is_fused(module)]:
            packed = runtime.PackedExperts(fused, EXPERT_ROLES[0], lambda i, o, b: QuantizedLinear(i, o, 32, b))
            weights = {f"{place}.{key}": value for key, value in fused.named_parameters(recurse=False)}
            layer.set_submodule(place, packed)
            for key, value in split_fused(layer, weights, "layer").items():
                module = layer.get_submodule(key.rpartition(".")[0])
                if key.endswith("bias"):
                    module.bias = value.data
                else:
                    module.qweight, module.qzeros, module.scales = quantize_weight(value, 4, 32)
    model.half().to(device)
    ids = torch.randint(0, 4096, (2, 3), generator=torch.manual_seed(1)).to(device)
    with monkeypatch.context() as patch:
        patch.setattr(runtime.PackedExperts, "forward", SeparateExperts.forward)
        expected = model(ids, use_cache=False).logits.float()
    fallbacks.clear()
    logging.disable(logging.NOTSET)
    compute = SeparateExperts._expert
    monkeypatch.setattr(SeparateExperts, "_expert", None)  # the loop over experts
    found = model(ids, use_cache=False).logits.float()
    assert not fallbacks
    assert relative_error(found, expected.double()) < 0.01
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(ids, use_cache=False).logits.float(), found, rtol=0.01, atol=0.01)
    monkeypatch.setattr(SeparateExperts, "_expert", compute)
    wide = copy.deepcopy(model).float()
    assert relative_error(wide(ids, use_cache=False).logits, expected.double()) < 0.02
    assert any("float32" in reason for _, reason in fallbacks)
