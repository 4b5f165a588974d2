"""What `fuse` takes for a norm, a gated MLP or rotary positions, and what only looks like one."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny.families import SPARSE
from tiny.models import ARCHITECTURES
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from kvconvert.kernels.elementwise import Gate, Norm
from kvconvert.methods import KVScheme
from kvconvert.runtime.hf import fused_modules
from kvconvert.runtime.hf.fuse import fuse, fuse_residuals
from kvconvert.runtime.hf.fused_modules import (
    find_gate,
    fuse_gated_mlp,
    fuse_gated_norm,
    fuse_norm,
    fuse_rotary,
)
from kvconvert.runtime.hf.generation import adopt

DTYPE = torch.bfloat16


def with_random_weight(norm: nn.Module) -> nn.Module:
    nn.init.normal_(norm.weight, 1.0, 0.5)
    return norm.to(DTYPE).requires_grad_(False)


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (LlamaRMSNorm(96, 1e-5), Norm(1e-5)),
        (GptOssRMSNorm(96, 1e-6), Norm(1e-6, rounded=False)),
        (GemmaRMSNorm(96, 1e-6), Norm(1e-6, offset=1.0, rounded=False)),
    ],
)
def test_norms_are_told_apart_by_how_they_round(norm, kind):
    assert fused_modules._find_norm(with_random_weight(norm), DTYPE) == kind


class NoMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(96)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class Moved(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 0.01


@pytest.mark.parametrize("norm", [nn.LayerNorm(96), nn.LayerNorm(96, bias=False), NoMean(), Moved(96)])
def test_what_is_no_rms_norm_is_left_alone(norm):
    norm = with_random_weight(norm)
    assert not fuse_norm(norm, DTYPE)
    assert "forward" not in norm.__dict__


def test_norms_with_a_gate_of_another_dtype_or_with_a_hook_are_left_alone():
    assert not fuse_norm(with_random_weight(Qwen3NextRMSNormGated(96)), DTYPE)
    assert not fuse_norm(LlamaRMSNorm(96), DTYPE)
    hooked = with_random_weight(LlamaRMSNorm(96))
    hooked.forward = hooked.forward
    assert not fuse_norm(hooked, DTYPE)


def test_norms_with_a_gate_are_found_by_what_they_compute():
    norm, x = with_random_weight(Qwen3NextRMSNormGated(96)), torch.randn(5, 96, dtype=DTYPE)
    expected = norm(x, x.flip(0))
    assert fuse_gated_norm(norm, DTYPE)
    assert torch.equal(norm(x, x.flip(0)), expected)
    assert not fuse_gated_norm(norm, DTYPE)
    for other in (MambaRMSNormGated(96, 96), LlamaRMSNorm(96)):  # the gate comes before the norm; there is none
        assert not fuse_gated_norm(with_random_weight(other), DTYPE)


class MLP(nn.Module):
    """A gated MLP; `limit` clamps, `sparse` zeroes small activations, `scale` multiplies the output."""

    def __init__(self, activation: str, limit: float = 0.0, sparse: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act_fn = ACT2FN[activation]
        self.limited, self.sparse, self.scale = limit, sparse, scale
        self.to(DTYPE).requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limited:
            up = up.clamp(-self.limited, self.limited)
        if self.sparse:
            gate = gate.masked_fill(gate < gate.float().mean(-1, keepdim=True).to(gate.dtype), 0.0)
        return self.down_proj(self.act_fn(gate) * up) * self.scale


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu"])
def test_gated_mlps_are_found_whatever_their_activation(activation):
    mlp, x = MLP(activation), torch.randn(3, 32, dtype=DTYPE)
    expected = mlp(x)
    assert fuse_gated_mlp(mlp, DTYPE)
    assert torch.equal(mlp(x), expected)
    assert not fuse_gated_mlp(mlp, DTYPE)


@pytest.mark.parametrize("mlp", [MLP("silu", limit=7.0), MLP("silu", sparse=True), MLP("silu", scale=0.9), MLP("tanh")])
def test_mlps_that_compute_more_are_left_alone(mlp):
    assert not fuse_gated_mlp(mlp, DTYPE)
    assert "forward" not in mlp.__dict__


def test_the_gate_of_experts_is_found_with_its_constants():
    config = AutoConfig.for_model("gpt_oss", hidden_size=32, intermediate_size=32, num_local_experts=2)
    experts = GptOssExperts(config)

    def joined(gate: Tensor, up: Tensor) -> Tensor:
        return experts._apply_gate(torch.stack((gate, up), -1).flatten(-2))

    assert find_gate(joined, experts) == Gate("silu", experts.alpha, experts.limit, 1.0)
    experts.limit = 3.0
    assert find_gate(joined, experts).limit == 3.0
    assert find_gate(lambda gate, up: torch.tanh(gate) * up, experts) is None


def test_rotary_positions_are_fused_by_halves_only_and_for_the_instance_only():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    interleaved = CohereAttention(AutoConfig.for_model("cohere", **sizes), 0)
    assert not fuse_rotary(interleaved)
    config = AutoConfig.for_model("llama", **sizes)
    config._attn_implementation = "eager"
    attention, other = (LlamaAttention(config, 0).eval().requires_grad_(False) for _ in range(2))
    own = LlamaAttention.forward
    arguments = {
        "hidden_states": torch.randn(2, 3, 64),
        "position_embeddings": (torch.randn(2, 3, 16), torch.randn(2, 3, 16)),
        "attention_mask": None,
    }
    expected = attention(**arguments)[0]
    assert fuse_rotary(attention)
    torch.testing.assert_close(attention(**arguments)[0], expected)
    assert LlamaAttention.forward is own
    assert "forward" not in other.__dict__
    assert inspect.signature(attention.forward) == inspect.signature(other.forward)
    assert not fuse_rotary(attention)


@pytest.mark.parametrize("rotated", [8, 16])
def test_rotary_positions_of_the_first_channels_are_fused(rotated, monkeypatch):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=1, **sizes)
    config._attn_implementation = "eager"
    attention = Qwen3_5Attention(config, 0).eval().requires_grad_(False)
    tables = torch.randn(2, 3, rotated), torch.randn(2, 3, rotated)
    arguments = {"hidden_states": torch.randn(2, 3, 64), "position_embeddings": tables, "attention_mask": None}
    expected, fused = attention(**arguments)[0], []
    assert fuse_rotary(attention)
    rotary = fused_modules.rotary
    monkeypatch.setattr(fused_modules, "unsupported", lambda *_: None)
    monkeypatch.setattr(fused_modules, "rotary", lambda *given: fused.append(given) or rotary(*given))
    torch.testing.assert_close(attention(**arguments)[0], expected)
    assert fused


def test_an_indexer_that_rotates_reads_the_cache_whether_a_model_is_fused_before_or_after():
    model = SPARSE["deepseek_v32"].build()
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    assert indexers
    assert not any(map(fuse_rotary, indexers))
    adopt(model, [KVScheme.preset("latent-4bit")] * model.config.num_hidden_layers, {})
    assert all("forward" in module.__dict__ for module in indexers)


@pytest.mark.parametrize("name", ["gemma2", "granite", "olmo2", "glm4"])
def test_layers_with_more_norms_or_other_factors_keep_their_forward(name):
    model = ARCHITECTURES[name].build()
    assert "residuals" not in fuse(model)
    assert fuse(model) == {}
    assert not [layer for layer in model.model.layers if "forward" in layer.__dict__]


def test_layers_that_choose_what_attention_gets_keep_their_forward():
    model = ARCHITECTURES["llama"].build()
    first, second = model.model.layers
    kind = type(first)

    class Choosing(kind):
        def forward(self, hidden_states: Tensor, position_embeddings=None, **kwargs) -> Tensor:
            return super().forward(hidden_states, position_embeddings=position_embeddings[:1], **kwargs)

    second.__class__ = Choosing
    for norm in (first.input_layernorm, first.post_attention_layernorm, model.model.norm):
        assert fuse_norm(norm, torch.float32)
    for norm in (second.input_layernorm, second.post_attention_layernorm):
        assert fuse_norm(norm, torch.float32)
    assert fuse_residuals([first, second], model.model.norm, torch.float32) == 1
    assert "forward" not in second.__dict__
    assert type(first.self_attn).__name__ == "LlamaAttention"
