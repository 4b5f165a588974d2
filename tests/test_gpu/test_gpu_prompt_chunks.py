"""Prompt chunks over a cache with kernels give what the reference path gives over pages as they are stored."""

import copy

import pytest
import torch
from tiny import prompt_chunks
from tiny.prompt_chunks import SCHEMES, WINDOW, counted, error, layer_of, outputs, window

from kvconvert.kernels import decode
from kvconvert.kernels import device as dispatch
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.chunked_prefill import FEWEST_QUERIES
from kvconvert.runtime.cache.chunked_prefill import ChunkedPrefill
from kvconvert.runtime.cache.forward_pass import PassTokens

HALF = torch.float16
FULL = pytest.mark.full


def compare(monkeypatch, device, layer, lengths=(290, 70), first_interpreted=True, **options) -> list[int]:
    """The last chunk's attention on both paths is the same; the rows of which a history was dequantized for it.

    Without `first_interpreted` the interpreter, where there is one, has no part in the first chunk: it takes it long.
    """

    def read(layer):
        if first_interpreted:
            return outputs(layer, lengths, device, HALF, **options)
        with dispatch.interpreted(False):
            outputs(layer, lengths[:1], device, HALF, **options)
        return outputs(layer, lengths[1:], device, HALF, **options)

    with dispatch.interpreted(False), monkeypatch.context() as patch:
        patch.setattr(decode, "unsupported", lambda *given: "the reference is wanted")
        patch.setattr(ChunkedPrefill, "is_served", lambda *given: False)
        other = copy.deepcopy(layer)
        expected = read(other)
    # What the kernels make of a first prompt is tested elsewhere.
    for name in ("seal", "end_forward"):
        original = getattr(prompt_chunks, name)
        monkeypatch.setattr(prompt_chunks, name, lambda stored, run=original: _outside_kernels(run, stored))
    monkeypatch.setitem(FEWEST_QUERIES, "cuda", 32)
    rows = counted(monkeypatch)
    got = read(layer)
    # Products of halves with float32 sums, dequantized tokens and partial results rounded to halves.
    assert error(got[-1], expected[-1]) < 2e-3
    return rows


def _outside_kernels(run, stored):
    with dispatch.interpreted(False):
        run(stored)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("norms and sink tokens", marks=FULL),
        "keys stay longer",
        "values stay longer",
        pytest.param("16 and 8 bits", marks=FULL),
        pytest.param("eviction", marks=FULL),
        "spans",
    ],
)
def test_chunks_over_stored_tokens_of_every_kind(device, monkeypatch, name):
    layer = layer_of(SCHEMES[name])
    assert compare(monkeypatch, device, layer, first_interpreted=False, rows=2) == [0, 1]
    assert layer.store.fallbacks == 0


@pytest.mark.quick("(290, 40)")
@pytest.mark.parametrize(
    ("lengths", "rows"), [((100, 70), 2), ((290, 40), 1), pytest.param((500, 200), 2, marks=FULL)], ids=str
)
def test_sliding_windows_before_and_after_pages_were_dropped(device, monkeypatch, lengths, rows):
    layer = layer_of(SCHEMES["norms and sink tokens"], WINDOW)
    options = {"mask_function": window, "sink_logits": torch.linspace(-2, 3, 4).to(device), "softcap": 5.0}
    served = compare(monkeypatch, device, layer, lengths, rows=rows, **options)
    # Also the first chunk, of which all queries attend to a window.
    assert served == 2 * list(range(rows))
    assert layer.store.sequences[0].dropped == max(0, (sum(lengths) - WINDOW - 2) // 128)
    assert layer.store.fallbacks == 0


REASONS = [
    ("spans with tau", None, None, 0, "extremes"),
    ("spans", window, WINDOW, 0, "not consecutive"),
    ("eviction", window, WINDOW, 0, "not consecutive"),
    ("norms and sink tokens", window, None, 0, "neither causal nor"),
    ("norms and sink tokens", window, WINDOW - 1, 0, "neither causal nor"),
    ("norms and sink tokens", lambda b, h, q, k: (k <= q) | (k == 410), None, 0, "neither causal nor"),
    ("norms and sink tokens", window, WINDOW, 2, "padding within"),
    ("norms and sink tokens", window, WINDOW, 1, None),
    ("norms and sink tokens", None, WINDOW, 2, None),
    ("spans", None, None, 0, None),
]


@pytest.mark.parametrize(("name", "mask_function", "sliding_window", "row", "reason"), REASONS)
def test_what_is_not_served_has_a_reason_and_is_counted(
    device, monkeypatch, name, mask_function, sliding_window, row, reason
):
    layer = layer_of(SCHEMES[name], sliding_window)
    with dispatch.interpreted(False), monkeypatch.context() as patch:
        patch.setattr(ChunkedPrefill, "is_served", lambda *given: False)
        patch.setattr(decode, "unsupported", lambda *given: "the reference is wanted")
        outputs(layer, (400, 60), device, HALF, None if name in ("spans", "eviction") else mask_function)
    monkeypatch.setattr(dispatch, "fallbacks", type(dispatch.fallbacks)())
    store, positions = layer.store, torch.arange(400, 460, device=device)
    store.fallbacks = 0
    chunk = PassTokens(positions, None, mask_function)
    queries = torch.zeros(3, 4, 60, 32, dtype=HALF, device=device)
    history = ChunkedPrefill(store, row, chunk, Scoring(0.2))
    for few in (1, 32):
        assert not history.is_served(queries[:, :, :few])
    assert store.fallbacks == 0
    if device.type == "cuda":
        monkeypatch.setitem(FEWEST_QUERIES, "cuda", 32)
    assert history.is_served(queries) == (reason is None)
    assert store.fallbacks == (reason is not None)
    assert [key[0] for key in dispatch.fallbacks] == ["attention of prompts over stored tokens"] * (reason is not None)
    assert all(reason in key[1] for key in dispatch.fallbacks)
