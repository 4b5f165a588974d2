"""Column sums and selection of prompt tokens, against small independent oracles."""

import pytest
import torch

from kvconvert.kernels.attention import attention_reference
from kvconvert.kernels.select import blockwise_column_sums, select_tokens


def by_loops(queries, keys, visible, scaling):
    """One weight at a time."""
    heads, n, _ = keys.shape
    sums = torch.zeros(heads, n, dtype=torch.float64)
    for head in range(queries.shape[0]):
        kv = head // (queries.shape[0] // heads)
        for t in range(queries.shape[1]):
            scores = [float(queries[head, t].double() @ keys[kv, j].double()) * scaling for j in range(n)]
            shown = [j for j in range(n) if visible[t, j]]
            total = sum(torch.tensor(scores[j]).double().exp() for j in shown)
            for j in shown:
                sums[kv, j] += torch.tensor(scores[j]).double().exp() / total
    return sums


def test_the_reference_sums_the_weights_of_each_token():
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 5, 8), torch.randn(2, 7, 8)
    visible = torch.arange(7)[None] <= torch.arange(5)[:, None] + 2
    expected = by_loops(queries, keys, visible, 0.3)
    # float32 scores in the loops' exponentials
    torch.testing.assert_close(
        attention_reference(queries, keys, None, visible, 0.3).mass, expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("block", [1 << 22, 700, 1])
@pytest.mark.parametrize(("length", "tokens"), [(1, 1), (63, 63), (40, 129)])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"sink_logits": torch.linspace(-1, 3, 6)}])
def test_blocks_give_the_same_sums(block, length, tokens, extras):
    torch.manual_seed(1)
    queries, keys = torch.randn(6, length, 16), torch.randn(3, tokens, 16)
    causal = torch.arange(tokens)[None] <= torch.arange(length)[:, None] + tokens - length
    got = blockwise_column_sums(queries, keys, None, 0.25, **extras, block_scores=block)
    torch.testing.assert_close(
        got.double(), attention_reference(queries, keys, None, causal, 0.25, **extras).mass, rtol=1e-4, atol=1e-5
    )
    window = causal & (torch.arange(tokens)[None] > torch.arange(length)[:, None] + tokens - length - 9)
    masked = blockwise_column_sums(queries, keys, lambda q, k: window[q, k], 0.25, **extras, block_scores=block)
    expected = attention_reference(queries, keys, None, window, 0.25, **extras).mass
    torch.testing.assert_close(masked.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("heavy", "recent", "sink_tokens", "expected"),
    [
        (2, 1, 0, [[1, 3, 5], [0, 2, 5]]),
        (0, 2, 0, [[4, 5], [4, 5]]),
        (1, 0, 0, [[3], [5]]),
        (1, 1, 2, [[0, 1, 3, 5], [0, 1, 2, 5]]),
        (9, 9, 9, [[0, 1, 2, 3, 4, 5]] * 2),
        (0, 0, 0, [[], []]),
    ],
)
def test_selection_keeps_sink_tokens_the_heaviest_and_the_newest_in_order(heavy, recent, sink_tokens, expected):
    scores = torch.tensor([[0.0, 5, 1, 7, 1, 2], [4.0, 1, 4, 1, 1, 9]])
    assert select_tokens(scores, heavy, recent, sink_tokens).tolist() == expected
