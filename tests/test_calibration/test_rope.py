"""RoPE read off the tables that transformers makes for a layer, and the constant part of keys that it leaves."""

import pytest
import torch
from transformers import CohereConfig, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_neighbours
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partial
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvconvert.calibration.keys import constant_part, ropes_of

TOKENS = 700
SCALED = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "large_base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
}


def tables(rotary, dtype, *arguments):
    positions = torch.arange(TOKENS)[None]
    return rotary(torch.zeros(1, TOKENS, 8, dtype=dtype), positions, *arguments)


def recovered(embeddings, apply, dim, seed=0):
    """The mean of keys [H, D] with a constant part that went through the model's own RoPE, and what was found."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(2, dim, generator=generator)
    noise = torch.randn(2, 2, TOKENS, dim, generator=generator)
    embeddings = tuple(table.float() for table in embeddings)
    _, keys = apply(noise, mean[None, :, None] + noise, *embeddings)
    ropes = ropes_of(embeddings, dim)
    assert not isinstance(ropes, str), ropes
    return mean, *constant_part(keys, ropes, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALED)
def test_the_mean_before_rope_is_found_again_for_every_scaling_of_fixed_angles(kind, dtype):
    config = LlamaConfig(head_dim=64, max_position_embeddings=1024, rope_parameters=SCALED[kind])
    rotary = LlamaRotaryEmbedding(config)
    embeddings = tables(rotary, dtype)
    found = ropes_of(embeddings, 64)
    # Phases at 30,000 tokens: rounding of tables may not turn a page by more than a small angle.
    drift = 30_000 * (found[0].frequencies.double() - rotary.inv_freq.double()).abs().max()
    assert drift < (0.05 if dtype == torch.float32 else 0.5)
    mean, rope, constant, share = recovered(tables(rotary, torch.float32), apply_rotary_pos_emb, 64)
    assert rope.scale == pytest.approx(rotary.attention_scaling, rel=1e-4)
    # 1,392 keys of unit variance: their mean is within 0.15 of the truth.
    torch.testing.assert_close(constant, mean * rope.scale, atol=0.15, rtol=0)
    assert bool((share > 0.8).all())


def test_pairs_of_neighbours_are_told_from_halves():
    rotary = CohereRotaryEmbedding(CohereConfig(hidden_size=64, num_attention_heads=2))
    mean, rope, constant, _ = recovered(tables(rotary, torch.float32), apply_neighbours, 32)
    assert rope.pairs[:2].tolist() == [[0, 1], [2, 3]]
    torch.testing.assert_close(constant, mean, atol=0.15, rtol=0)


def test_halves_are_preferred_by_keys_that_they_make_constant():
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=32))
    _, rope, _, _ = recovered(tables(rotary, torch.float32), apply_rotary_pos_emb, 32)
    assert rope.pairs[:2].tolist() == [[0, 16], [1, 17]]


def test_channels_without_rope_do_not_turn():
    config = GPTNeoXConfig(hidden_size=128, num_attention_heads=2, rotary_pct=0.25)
    mean, rope, constant, _ = recovered(tables(GPTNeoXRotaryEmbedding(config), torch.float32), apply_partial, 64)
    assert rope.frequencies[8:].tolist() == [0.0] * 24
    assert sorted(rope.pairs.flatten().tolist()) == list(range(64))
    torch.testing.assert_close(constant, mean, atol=0.15, rtol=0)


def test_layers_of_two_kinds_have_their_own_frequencies():
    rotary = Gemma3RotaryEmbedding(
        Gemma3TextConfig(head_dim=32, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    )
    bases = [ropes_of(tables(rotary, torch.float32, kind), 32)[0].frequencies for kind in rotary.layer_types]
    assert not torch.allclose(*bases)


@pytest.mark.parametrize(
    ("embeddings", "reason"),
    [
        (None, "no table"),
        (torch.zeros(1, 8, 4), "no table"),
        ((torch.ones(3, 1, 8, 4), torch.ones(3, 1, 8, 4)), "no table"),  # one for each axis of images
        ((torch.ones(2, 8, 4), torch.zeros(2, 8, 4)), "not those of one sequence"),
        ((torch.ones(1, 8, 32), torch.zeros(1, 8, 32)), "32 channels of heads of 16"),
        ((torch.rand(1, 8, 8), torch.rand(1, 8, 8)), "does not turn by equal angles"),
    ],
)
def test_what_is_no_rope_of_one_sequence_is_refused_with_the_reason(embeddings, reason):
    assert reason in ropes_of(embeddings, 16)
