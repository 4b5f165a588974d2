"""Mamba 2 as linear attention with a decay equals transformers' scan of each sequence."""

import itertools

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from kvconvert.runtime.hf.state_steps import MAMBA_SCAN, mamba2_scan

LENGTHS, HEADS, GROUPS, HEAD_DIM, STATE = (5, 1, 70), 4, 2, 16, 32


def decayed_attention(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens):
    """What flash-linear-attention computes, token by token."""
    assert output_final_state
    assert state_v_first
    output, states = torch.empty_like(v), initial_state.clone()
    for sequence, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        for token in range(begin, end):
            kept = states[sequence] * g[0, token].exp()[:, None, None]
            states[sequence] = kept + v[0, token][..., None] * k[0, token][:, None]
            output[0, token] = scale * (states[sequence] @ q[0, token][..., None])[..., 0]
    return output, states


def arguments(device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    tokens = sum(LENGTHS)
    given = draw(1, tokens, HEADS, HEAD_DIM), draw(1, tokens, HEADS), -draw(HEADS).exp()
    given += draw(1, tokens, GROUPS, STATE), draw(1, tokens, GROUPS, STATE)
    options = {"chunk_size": 16, "D": draw(HEADS), "dt_bias": draw(HEADS), "dt_softplus": True}
    options |= {"dt_limit": (0.01, 5.0), "return_final_states": True, "z": None}
    return given, options, draw(len(LENGTHS), HEADS, HEAD_DIM, STATE)


def expected(given, options, states):
    """Each sequence by itself."""
    x, dt, decay, b, c = given
    parts = [part.split(LENGTHS, 1) for part in (x, dt, b, c)]
    found = [
        mamba2_chunk_scan(x, dt, decay, b, c, initial_states=state, **options)
        for x, dt, b, c, state in zip(*parts, states.split(1), strict=True)
    ]
    return torch.cat([output for output, _ in found], 1), torch.cat([state for _, state in found])


def test_the_scan_of_sequences_side_by_side_is_that_of_each():
    given, options, states = arguments()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = mamba2_scan(ends, decayed_attention)(*given, initial_states=states, **options)
    for own, other in zip(found, expected(given, options, states), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_transformers_names_its_scan_as_we_do():
    assert mamba2_chunk_scan.__name__ == MAMBA_SCAN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash-linear-attention's kernels need a GPU")
def test_the_kernels_of_flash_linear_attention_give_the_same():
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    given, options, states = arguments("cuda")
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    found = mamba2_scan(ends)(*given, initial_states=states, **options)
    for own, other in zip(found, expected(given, options, states), strict=True):
        assert float((own - other).norm() / other.norm()) < 1e-2
