"""Tokens chosen by searching for the least allowed logit are those chosen by sorting."""

import math

import pytest
import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.launches import record_specializations
from kvconvert.kernels.sampling import sample, sample_reference, unsupported
from kvconvert.kernels.sampling import triton as launch
from kvconvert.runtime.engine.sampling import RefuseNoNumbers

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_parts")
PART = 1024
# Temperature, top_k, top_p.
LIMITS = [
    *((0.0, 5, 0.5), (1.0, 0, 1.0), (1.0, 1, 1.0), (0.7, 20, 1.0), (1.0, 0, 0.9), (3.0, 0, 0.5), (1.0, 50, 0.95)),
    *((0.6, 700, 0.999), (1.0, 2**63 - 1, 1.0), (1.0, 0, 1e-20), (1e-38, 0, 0.9), (1e30, 30, 0.31), (2.0, 0, 0.9999)),
]


@pytest.fixture
def small_parts(monkeypatch):
    """Few tokens are several programs' then."""
    monkeypatch.setattr(launch, "PART", PART)


def draw(shape, sigma, dtype, seed=0):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * sigma
    return logits.to(dtype)


def columns(limits, seed=0):
    """What `sample` takes beside the logits."""
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*limits, strict=True))
    seeds = torch.arange(len(limits)) * 0x1234567_89ABCDEF + seed
    return temperature.float(), top_k, top_p.float(), seeds, torch.arange(len(limits)) + seed


def agree(device, logits, given):
    assert unsupported(logits.to(device)) is None
    found = sample(logits.to(device), *(column.to(device) for column in given))
    expected = sample_reference(logits, *given, restrict=True)
    assert found.dtype == torch.int64
    assert found.tolist() == expected.tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sigma", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(
    "vocabulary", [1, 7, 1000, PART, PART + 6, pytest.param(2 * PART + 77, marks=pytest.mark.full)]
)
def test_tokens_are_those_of_the_reference(device, dtype, sigma, vocabulary):
    limits = LIMITS[vocabulary % 2 :: 2]  # each with small vocabularies and with large ones
    agree(device, draw((len(limits), vocabulary), sigma, dtype), columns(limits))


# The search takes twice the passes through keys of 32 bits, for which the grid above has a cell in `make test`, too.
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_logits_the_first_are_allowed(device, dtype):
    # A few values, zeros of both signs among them, so that thresholds are shared by thousands across all parts.
    logits = (draw((len(LIMITS[1::2]), 2 * PART + 77), 1.0, dtype) * 1.5).round()
    assert (logits.signbit() & (logits == 0)).any()
    agree(device, logits, columns(LIMITS[1::2]))
    equal = torch.zeros(7, PART + 3, dtype=dtype)
    agree(device, equal, columns([(1.0, k, p) for k in (1, 5, PART + 1) for p in (0.33, 1.0)] + [(1.0, 0, 0.999)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_ruled_out_are_never_chosen(device, dtype):
    logits = draw((len(LIMITS), PART + 500), 2.0, dtype)
    logits[:, 10:-5] = -math.inf
    logits[0], logits[0, -1] = -math.inf, -5.0
    agree(device, logits, columns(LIMITS))


def test_rows_may_lie_apart(device):
    logits = draw((len(LIMITS), 3, 501), 2.0, torch.bfloat16)
    agree(device, logits[:, 1], columns(LIMITS))


def test_the_token_that_crosses_top_p_is_the_last(device):
    logits = torch.full((20,), -50.0)
    logits[4:14] = 1.0  # each with a tenth
    for top_p, count in ((0.15, 2), (0.45, 5), (0.85, 9), (0.95, 10)):
        given = columns([(1.0, 0, top_p)] * 80)
        drawn = sample_reference(logits.expand(80, -1), *given, restrict=True).tolist()
        assert set(drawn) == set(range(4, 4 + count))
        # The first that draw the last of the tokens, and the first that draw another.
        told = [drawn.index(3 + count), drawn.index(4)]
        agree(device, logits.repeat(2, 1), [column[told] for column in given])


def test_without_restrictions_one_pass_finds_the_best_and_one_draws(device):
    logits = draw((4, 2 * PART + 5), 2.0, torch.bfloat16).to(device)
    given = [column.to(device) for column in columns([(1.0, 0, 1.0), (0.0, 0, 1.0), (0.3, 0, 1.0), (5.0, 0, 1.0)])]
    with record_specializations(makes=True) as launched:
        found = sample(logits, *given, restrict=False)
    assert {launch.name for launch in launched} == {"extremes_kernel", "draw_kernel"}
    assert found.tolist() == sample_reference(logits.cpu(), *(c.cpu() for c in given), restrict=False).tolist()
    assert found.equal(sample(logits, *given))


def test_what_the_kernels_do_not_take(device):
    assert "float32" in unsupported(torch.zeros(1, 8, dtype=torch.float64, device=device))
    assert "side by side" in unsupported(torch.zeros(8, 8, device=device).T)


def test_no_numbers_after_the_first_token_are_told_at_the_latest_at_the_end(device):
    scores = torch.zeros(2, 5, device=device)
    refusing = RefuseNoNumbers()
    refusing(None, scores)
    refusing(None, scores.index_fill(1, torch.tensor(3, device=device), -torch.inf))
    refusing.check()
    scores[1, 2] = torch.nan

    def two_more_tokens():
        refusing(None, scores)  # where it is told on a CPU
        refusing(None, torch.zeros_like(scores))
        refusing.check()

    with pytest.raises(NumericError, match="no token can be chosen"):
        two_more_tokens()
