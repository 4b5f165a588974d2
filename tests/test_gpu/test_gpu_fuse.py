"""A fused model computes what it computed before, in every architecture, and says what was fused."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny.models import ARCHITECTURES
from torch import nn

from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import quantize_weight
from kvconvert.runtime.hf.fuse import fuse, fuse_on_gpus

# What `make test` takes, in so many layers; the full suite takes every architecture of the tests.
FEW = {"llama": {"num_hidden_layers": 1}}


def quantized(model: nn.Module) -> nn.Module:
    """The model in fp16 with packed Linears wherever 32 divides their sizes, but for the head."""
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            inputs, outputs = linear.in_features, linear.out_features
            if inputs % 32 == 0 and outputs % 8 == 0:
                model.set_submodule(
                    name, QuantizedLinear.from_weight(quantize_weight(linear.weight, 4, 32), linear.bias)
                )
    return model.half()


def architectures() -> list:
    texts = [name for name, tiny in ARCHITECTURES.items() if not tiny.multimodal]
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in texts]


@pytest.mark.parametrize("name", architectures())
@torch.no_grad()
def test_fused_models_compute_what_they_did(name, device):
    model = quantized(ARCHITECTURES[name].build(**FEW.get(name, {}))).to(device)
    inputs = {key: value.to(device) for key, value in ARCHITECTURES[name].inputs(2, 5, padding=1).items()}
    before = model(**inputs, use_cache=False).logits.float()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    fuse(model)
    for _ in range(2):
        after = model(**inputs, use_cache=False).logits.float()
        assert float((after - before).norm() / before.norm()) < 0.01
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_a_model_is_fused_as_soon_as_it_is_on_a_gpu(device):
    model = quantized(ARCHITECTURES["llama"].build(num_hidden_layers=1))
    fuse_on_gpus(model)
    model.to(device)
    # Nothing is left to be fused then.
    assert (fuse(model) == {}) == (device.type == "cuda")


@torch.no_grad()
def test_the_summary_counts_places(device):
    model = quantized(ARCHITECTURES["llama"].build()).to(device)
    layers = model.config.num_hidden_layers
    assert fuse(model) == {
        "q_proj+k_proj+v_proj": layers,
        "gate_proj+up_proj": layers,
        "norms": 2 * layers + 1,
        "gated MLPs": layers,
        "rotary positions": layers,
        "residuals": layers,
    }
    assert fuse(model) == {}


@torch.no_grad()
@pytest.mark.full
def test_a_copy_of_a_fused_model_is_right_by_itself(device):
    tiny = ARCHITECTURES["llama"]
    model = quantized(tiny.build()).to(device)
    fuse(model)
    inputs = {key: value.to(device) for key, value in tiny.inputs(1, 4).items()}
    expected = model(**inputs, use_cache=False).logits
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    torch.testing.assert_close(other(**inputs, use_cache=False).logits, expected, rtol=0.02, atol=0.02)
