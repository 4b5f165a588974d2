"""Fused experts taken apart: the same function, the names that checkpoints give to experts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny.mixtures import few_and_full, tiny_mixture
from torch import nn
from transformers import NemotronHConfig, Step3p7TextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from kvconvert.errors import CheckpointError, UnsupportedModelError
from kvconvert.models.experts import EXPERT_ROLES, separate_experts, split_fused


@pytest.mark.parametrize("model_type", few_and_full())
@torch.no_grad()
def test_separate_experts_compute_what_the_fused_ones_do(model_type):
    model, ids = tiny_mixture(model_type), torch.randint(0, 4096, (2, 24), generator=torch.manual_seed(1))
    expected, single = model(ids).logits, model(ids[:1, :1]).logits
    parameters = sum(parameter.numel() for parameter in model.parameters())
    separate_experts(model, EXPERT_ROLES[0])
    assert not [name for name, parameter in model.named_parameters() if parameter.ndim > 2]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    # Sums over an expert's tokens are taken in another order than grouped products take them.
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids[:1, :1]).logits, single, rtol=1e-5, atol=1e-5)


def test_the_names_are_the_ones_that_were_asked_for():
    layer = separate_experts(tiny_mixture("mixtral").model.layers[0], EXPERT_ROLES[1])
    assert isinstance(layer.mlp.experts.get_submodule("3.w2"), nn.Linear)
    assert {name.rpartition(".experts.")[2] for name in layer.state_dict() if ".experts.3." in name} == {
        "3.w1.weight",
        "3.w3.weight",
        "3.w2.weight",
    }


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text"])
def test_fused_tensors_fill_a_layer_without_weights_and_separate_ones_pass_through(model_type):
    source = tiny_mixture(model_type).model.layers[1]
    fused = source.state_dict()
    with torch.device("meta"):
        empty = separate_experts(tiny_mixture(model_type).model.layers[1].to("meta"), EXPERT_ROLES[0])
    split = split_fused(empty, fused, "layers.1")
    expected = separate_experts(source, EXPERT_ROLES[0]).state_dict()
    assert split.keys() == expected.keys() == empty.state_dict().keys()
    assert all(torch.equal(split[name], expected[name]) for name in expected)
    assert split_fused(empty, split, "layers.1") == split


def test_a_fused_tensor_of_another_shape_is_refused_by_name():
    layer = tiny_mixture("mixtral").model.layers[0]
    tensors = layer.state_dict()
    tensors["mlp.experts.down_proj"] = tensors["mlp.experts.down_proj"][:3]
    separate_experts(layer, EXPERT_ROLES[0])
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj has shape \[3, 64, 96\] .*\[4, "):
        split_fused(layer, tensors, "layers.0")


def test_experts_of_an_unknown_kind_are_refused():
    class OddExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.zeros(4, 8, 8))

    with pytest.raises(UnsupportedModelError, match="OddExperts with up_proj"):
        separate_experts(nn.Sequential(OddExperts()), EXPERT_ROLES[0])


def test_experts_without_a_gate_compute_the_same():
    config = NemotronHConfig(
        hidden_size=16, moe_intermediate_size=8, n_routed_experts=4, mlp_hidden_act="relu2", moe_latent_size=None
    )
    config._experts_implementation = "eager"
    check_same(NemotronHExperts(config), ["up_proj", "down_proj"])


def test_experts_that_declare_no_layout_are_tried():
    config = Step3p7TextConfig(hidden_size=16, moe_intermediate_size=8, moe_num_experts=4, hidden_act="silu")
    check_same(Step3p7Experts(config, swiglu_limit=0.1), ["gate_proj", "up_proj", "down_proj"])

    class Odd(Step3p7Experts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return super().forward(hidden_states, top_k_index, top_k_weights**2)

    with pytest.raises(UnsupportedModelError, match="Odd computes otherwise than its weights say"):
        separate_experts(nn.Sequential(Odd(config)), EXPERT_ROLES[0])


def check_same(fused, linears):
    for parameter in fused.parameters():
        nn.init.normal_(parameter)
    tokens, weights = torch.randn(9, 16), torch.rand(9, 2)
    chosen = torch.randint(4, (9, 2))
    with torch.no_grad():
        expected = fused(tokens, chosen, weights)
        separate = separate_experts(nn.Sequential(fused), EXPERT_ROLES[0])[0]
        torch.testing.assert_close(separate(tokens, chosen, weights), expected)
    assert [*next(separate.experts())] == linears


def test_fused_tensors_with_inputs_before_outputs_are_turned_round():
    layer = tiny_mixture("mixtral").model.layers[0]
    turned = {name: value.transpose(1, 2) if value.ndim == 3 else value for name, value in layer.state_dict().items()}
    expected = separate_experts(layer, EXPERT_ROLES[0]).state_dict()
    split = split_fused(layer, turned, "layers.0")
    assert all(torch.equal(split[name], expected[name]) for name in expected)
