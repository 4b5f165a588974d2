"""Attention of a repeated prompt against its definition, and how heads share pages."""

import math

import pytest
import torch
from tiny.attention import repeated_by_reference

from kvconvert.kernels import select
from kvconvert.kernels.select import repeated_attention, share_pages


@pytest.mark.parametrize("length", [1, 64, 130, 192])
@pytest.mark.parametrize(("start", "sinks"), [(0, 0), (4, 4), (70, 4)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_parts_at_a_time_equal_one_masked_softmax(length, start, sinks, softcap, monkeypatch):
    torch.manual_seed(0)
    queries = torch.randn(2, 3, length, 16)
    repeated, stored = ([torch.randn(2, n, 16) for _ in range(2)] for n in (length, start + length + 9))
    arguments = queries, repeated, stored, start, 64, sinks, 0.7, softcap
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
    _, scores = repeated_by_reference(queries, (nothing, nothing), (eye[None], nothing), 0, 2, 0, 1.0)
    assert scores[0].tolist() == pytest.approx([1, 0, 1, 0])
    # Asked for in the other part, neither is seen.
    _, scores = repeated_by_reference(queries.flip(2), (nothing, nothing), (eye[None], nothing), 0, 2, 0, 1.0)
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
