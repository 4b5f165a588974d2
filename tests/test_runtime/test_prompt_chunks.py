"""A prompt chunk over stored tokens gives the same over a dequantized history and over pages as they are stored."""

import pytest
import torch
from tiny.prompt_chunks import SCHEMES, WINDOW, both_paths, counted, error, layer_of, window

CPU = torch.device("cpu")
# A prompt, a chunk over it, a few tokens, and another chunk.
LENGTHS = (400, 60, 3, 200)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in SCHEMES if "spans" not in name])
def test_chunks_over_stored_tokens_of_every_kind(monkeypatch, name, dtype):
    rows = counted(monkeypatch)
    got, expected = both_paths(monkeypatch, layer_of(SCHEMES[name]), LENGTHS, CPU, dtype)
    assert rows == [0, 1, 2, 0, 1, 2]
    for one, other in zip(got, expected, strict=True):
        # Both sum in float32; outputs are rounded to the dtype.
        assert error(one, other) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_sink_logits_count_once(monkeypatch):
    rows = counted(monkeypatch)
    logits = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    scheme = SCHEMES["norms and sink tokens"]
    got, expected = both_paths(monkeypatch, layer_of(scheme), LENGTHS, CPU, torch.float32, sink_logits=logits)
    assert len(rows) == 6
    assert max(error(one, other) for one, other in zip(got, expected, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("spans", {}),
        ("spans with tau", {}),
        ("norms and sink tokens", {"softcap": 20.0}),
        ("norms and sink tokens", {"mask_function": window}),
    ],
    ids=["spans", "spans with tau", "soft cap", "window"],
)
def test_what_a_cpu_does_not_serve_is_attended_to_as_it_is_stored(monkeypatch, name, options):
    rows = counted(monkeypatch)
    layer = layer_of(SCHEMES[name], WINDOW if "mask_function" in options else None)
    got, expected = both_paths(monkeypatch, layer, LENGTHS, CPU, torch.float32, **options)
    assert rows == []
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert layer.store.fallbacks == 0
