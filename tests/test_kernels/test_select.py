"""Column sums and selection of prompt tokens, against small independent oracles.

Attention of a repeated prompt against its definition, and how heads share pages.
"""

from __future__ import annotations

import math

import pytest
import torch
from tiny.attention import repeated_by_reference

from kvconvert.kernels import select
from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.select import blockwise_column_sums, repeated_attention, select_tokens, share_pages


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
    got = blockwise_column_sums(queries, keys, None, Scoring(0.25, **extras), block_scores=block)
    torch.testing.assert_close(
        got.double(), attention_reference(queries, keys, None, causal, 0.25, **extras).mass, rtol=1e-4, atol=1e-5
    )
    window = causal & (torch.arange(tokens)[None] > torch.arange(length)[:, None] + tokens - length - 9)
    masked = blockwise_column_sums(
        queries, keys, lambda q, k: window[q, k], Scoring(0.25, **extras), block_scores=block
    )
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


def test_heads_may_keep_different_numbers_of_tokens():
    scores, counts = torch.rand(4, 50).round(decimals=1), [7, 50, 0, 13]
    together = select_tokens(scores, counts, 0)
    for line, own, count in zip(together, scores, counts, strict=True):
        assert torch.equal(line[:count], select_tokens(own[None], count, 0)[0])


@pytest.mark.parametrize("length", [1, 64, 130, 192])
@pytest.mark.parametrize(("start", "sinks"), [(0, 0), (4, 4), (70, 4)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_parts_at_a_time_equal_one_masked_softmax(length, start, sinks, softcap, monkeypatch):
    torch.manual_seed(0)
    queries = torch.randn(2, 3, length, 16)
    repeated, stored = ([torch.randn(2, n, 16) for _ in range(2)] for n in (length, start + length + 9))
    arguments = queries, repeated, stored, start, 64, sinks, Scoring(0.7, softcap)
    expected = repeated_by_reference(*arguments)
    for scores in (1, 1 << 30):  # a part at a time, and all of them
        monkeypatch.setitem(select._BLOCK_SCORES, "cpu", scores)
        for found, wanted in zip(repeated_attention(*arguments), expected, strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)


def test_a_token_scores_what_its_own_part_pays_it_at_most():
    """Two parts of two tokens; query heads and queries are told apart by what they ask for."""
    eye = 30 * torch.eye(4)
    queries = eye[[0, 0, 2, 2]].view(1, 1, 4, 4)  # the first part asks for token 0, the second for token 2
    nothing = torch.zeros(1, 4, 4)
    _, scores = repeated_by_reference(queries, (nothing, nothing), (eye[None], nothing), 0, 2, 0, Scoring(1.0))
    assert scores[0].tolist() == pytest.approx([1, 0, 1, 0])
    # Asked for in the other part, neither is seen.
    _, scores = repeated_by_reference(queries.flip(2), (nothing, nothing), (eye[None], nothing), 0, 2, 0, Scoring(1.0))
    assert scores[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1 / 3], abs=0.01)


def test_pages_go_to_the_heads_with_the_best_tokens():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.1] * 6, [0.0, 0.75, 0.0, 0.0, 0.75, 0.0]])
    assert share_pages(scores, 1, 2) == [1, 0, 0]
    assert share_pages(scores, 2, 2) == [1, 0, 1]  # 0.85, and 0.75 before 0.65
    assert share_pages(scores, 3, 2) == [2, 0, 1]
    assert share_pages(scores, 6, 2) == [2, 2, 2]  # six tokens are three pages, and no head keeps all


def test_what_has_to_be_kept_comes_first():
    scores = torch.tensor([[0.9] * 8, [math.inf] + [0.0] * 7])
    assert share_pages(scores, 2, 4) == [1, 1]
