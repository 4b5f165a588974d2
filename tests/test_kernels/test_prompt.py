"""Attention of prompts without a GPU: torch's own and blocks of queries, against float64."""

import pytest
import torch

from kvconvert.kernels.attention import attention_reference, causal_mask
from kvconvert.kernels.prompt import BLOCK_SCORES, blockwise_attention, prompt_attention
from kvconvert.kernels.select import selective_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 63, 129])
def test_prompts_attend_causally_to_themselves(dtype, length):
    queries, keys, values = torch.randn(6, length, 80), torch.randn(2, length, 80), torch.randn(2, length, 80)
    got = prompt_attention(queries.to(dtype), keys.to(dtype), values.to(dtype), 0.1)
    expected = attention_reference(
        queries.to(dtype), keys.to(dtype), values.to(dtype), causal_mask(length, length), 0.1
    ).output
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [BLOCK_SCORES, 2500, 1])
@pytest.mark.parametrize(("length", "tokens"), [(1, 9), (40, 129), (63, 63), (0, 5)])
@pytest.mark.parametrize(
    "extras",
    [{}, {"softcap": 2.0}, {"sink_logits": torch.linspace(-1, 3, 6)}, {"window": 9}, {"window": 1}, {"window": 500}],
    ids=str,
)
def test_chunks_caps_sink_logits_and_windows_give_the_references_output_and_sums(block, length, tokens, extras):
    torch.manual_seed(3)
    queries, keys, values = torch.randn(6, length, 16), torch.randn(3, tokens, 16), torch.randn(3, tokens, 24)
    output = blockwise_attention(queries, keys, values, 0.25, **extras, block_scores=block)
    chosen, mass = selective_attention(queries, keys, values, 0.25, **extras)
    torch.testing.assert_close(chosen, output, rtol=1e-4, atol=1e-5)
    extras = dict(extras)
    visible = causal_mask(length, tokens, extras.pop("window", None))
    expected = attention_reference(queries, keys, values, visible, 0.25, **extras).output
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    sums = attention_reference(queries, keys, None, visible, 0.25, **extras).mass
    torch.testing.assert_close(mass.double(), sums, rtol=1e-4, atol=1e-5)
    assert mass.dtype == torch.float32
