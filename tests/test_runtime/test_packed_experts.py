"""Packed experts at run time: the right experts' weights for every token, and coverage that leaves none of them out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.errors import BundleError
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import dequantize_weight, quantize_weight
from kvconvert.runtime.hf.fused_modules import (
    EXPERT_ROLES,
    SeparateExperts,
    expert_names,
    fused_layout,
    merges_experts,
    place_packed_experts,
)

ROLES = EXPERT_ROLES[0]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}


def fused_and_packed(kind: type[nn.Module], config: object) -> tuple[nn.Module, SeparateExperts]:
    """Fused experts whose weights 4 bits hold exactly as quantized, and the packed ones."""
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    fused = kind(config).requires_grad_(False)
    layout = fused_layout(fused)
    packed = SeparateExperts(fused, ROLES, lambda i, o, bias: QuantizedLinear(i, o, 32, bias))
    for parameter in fused.parameters():
        parameter.normal_(0, 0.3)
    for number, expert in enumerate(packed.experts()):
        for name, rows in (("gate_up_proj", (ROLES.gate, ROLES.up)), ("down_proj", (ROLES.down,))):
            weight = getattr(fused, name)[number]
            weight = weight.T if layout.transposed else weight
            parts = [weight] if len(rows) == 1 else [weight[::2], weight[1::2]] if layout.interleaved else None
            for part, role in zip(parts or weight.chunk(2), rows, strict=True):
                stored = quantize_weight(part, 4, 32)
                part.copy_(dequantize_weight(stored, torch.float32))
                expert[role].qweight, expert[role].qzeros, expert[role].scales = stored
        if layout.bias:
            bias = fused.gate_up_proj_bias[number]
            expert[ROLES.gate].bias, expert[ROLES.up].bias = bias[::2].clone(), bias[1::2].clone()
            expert[ROLES.down].bias = fused.down_proj_bias[number].clone()
    return fused, packed


def route(tokens: int, choose: Callable[[Tensor], Tensor] = lambda scores: scores) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.manual_seed(2)
    scores, index = choose(torch.rand(tokens, 4, generator=generator)).topk(2, dim=-1)
    return torch.randn(tokens, 32, generator=generator), index, scores


@pytest.mark.parametrize("tokens", [1, 2, 77])
@pytest.mark.parametrize(
    ("kind", "config"), [(MixtralExperts, MixtralConfig(**SIZES)), (GptOssExperts, GptOssConfig(**SIZES))]
)
def test_packed_experts_compute_what_the_fused_ones_do_for_prompts_and_single_tokens(kind, config, tokens):
    fused, packed = fused_and_packed(kind, config)
    hidden, index, scores = route(tokens)
    torch.testing.assert_close(packed(hidden, index, scores), fused(hidden, index, scores), rtol=1e-4, atol=1e-4)


def test_packed_experts_take_inputs_that_scores_were_applied_to():
    fused, packed = fused_and_packed(Llama4TextExperts, Llama4TextConfig(**SIZES, intermediate_size_mlp=64))
    hidden, index, scores = route(9)
    applied = torch.zeros(9, 4).scatter_(1, index, scores)
    routed = hidden.repeat(4, 1) * applied.T.reshape(-1, 1)
    torch.testing.assert_close(packed(routed), fused(routed), rtol=1e-4, atol=1e-4)


def calls(packed: SeparateExperts) -> dict[str, int]:
    """Rows that each Linear computes, counted from now on."""
    rows: dict[str, int] = {}
    for name, module in packed.named_modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(lambda module, args, name=name: rows.update({name: len(args[0])}))
    return rows


def test_experts_without_tokens_are_not_computed_and_others_see_their_own_tokens_only():
    fused, packed = fused_and_packed(MixtralExperts, MixtralConfig(**SIZES))
    rows = calls(packed)
    hidden, index, scores = route(5, lambda scores: scores - 9 * torch.tensor([0.0, 1, 0, 1]))
    packed(hidden, index, scores)
    assert rows == {f"{expert}.{role}": 5 for expert in (0, 2) for role in ROLES}
    rows.clear()
    index[0, 1] = 4  # no expert
    got = packed(hidden, index, scores)
    assert {name: count for name, count in rows.items() if name.endswith("down_proj")} == {
        f"{expert}.down_proj": int((index == expert).sum()) for expert in (0, 2)
    }
    torch.testing.assert_close(got, fused(hidden, index, scores), rtol=1e-4, atol=1e-4)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList([MixtralExperts(MixtralConfig(**SIZES)) for _ in range(2)])


def covered(model: nn.Module) -> list[ModuleCoverage]:
    names = [f"layers.{i}.{name}" for i in range(2) for name in expert_names("x", fused_layout(model.layers[i]), ROLES)]
    return [ModuleCoverage(name=name.replace(".x", ""), method="awq", bits=4, group_size=32) for name in names]


def test_covered_experts_are_packed_and_nothing_else():
    model = TwoLayers()
    place_packed_experts(model, [entry for entry in covered(model) if entry.name.startswith("layers.1.")] + [KEPT])
    assert isinstance(model.layers[0], MixtralExperts)
    assert isinstance(model.layers[1].get_submodule("3.down_proj"), QuantizedLinear)
    assert {buffer.device.type for buffer in model.layers[1].buffers()} == {"meta"}


KEPT = ModuleCoverage(name="layers.0", kind="other", method="kept", reason="the recipe keeps weights")


@pytest.mark.parametrize("left_out", ["layers.1.2.up_proj", "layers.0.3.down_proj"])
def test_an_expert_that_the_manifest_passes_over_is_refused_by_name(left_out):
    model = TwoLayers()
    with pytest.raises(BundleError, match=f"does not list {left_out}"):
        place_packed_experts(model, [entry for entry in covered(model) if entry.name != left_out])


def test_an_expert_kept_beside_quantized_ones_is_refused_by_name():
    model = TwoLayers()
    kept = {"method": "kept", "bits": None, "group_size": None}
    entries = [e.model_copy(update=kept) if e.name == "layers.0.2.up_proj" else e for e in covered(model)]
    with pytest.raises(BundleError, match=r"keeps unquantized layers\.0\.2\.up_proj"):
        place_packed_experts(model, entries)


def test_quantized_weights_beside_experts_of_unknown_fate_are_refused():
    model = TwoLayers()
    with pytest.raises(BundleError, match=r"does not list layers\.0,"):
        place_packed_experts(model, [entry for entry in covered(model) if entry.name.startswith("layers.1.")])


def test_transformers_conversions_for_experts_are_told_from_others():
    mixtral = get_checkpoint_conversion_mapping("mixtral")
    assert [merges_experts(entry) for entry in mixtral] == [False, True, True]
