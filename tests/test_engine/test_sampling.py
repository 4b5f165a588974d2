import math
from collections import Counter

import pytest
import torch
from fake_model import FakeModel

from kvconvert.errors import UsageError
from kvconvert.kernels.sampling import CANDIDATES, gumbel_noise, sample, sample_likeliest, sample_reference
from kvconvert.runtime import Engine, Sampling

MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def plain_noise(seed, counter, token):
    """Gumbel noise in Python's own integers."""

    def mix64(x):
        x = x * 0x9E3779B97F4A7C15 & MASK64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
        return x ^ x >> 31

    def mix32(x):
        x = (x ^ x >> 16) * 0x7FEB352D & MASK32
        x = (x ^ x >> 15) * 0x846CA68B & MASK32
        return x ^ x >> 16

    key = mix64((seed + mix64(counter + 1)) & MASK64)
    bits = mix32(mix32((token + key) & MASK32) ^ key >> 32)
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def plain_allowed(logits, temperature, top_k, top_p):
    """Ids that may be drawn, from float64 softmax."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    allowed, summed = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if allowed and summed >= top_p * sum(weights):
            break
        allowed.append(i)
        summed += weight
    return allowed


def columns(rows):
    """Rows of (temperature, top_k, top_p, seed, counter) as the tensors that `sample` takes."""
    temperature, top_k, top_p, seed, counter = zip(*rows, strict=True)
    return [
        *(
            torch.tensor(temperature, dtype=torch.float32),
            torch.tensor(top_k),
            torch.tensor(top_p, dtype=torch.float32),
        ),
        *(torch.tensor(seed), torch.tensor(counter)),
    ]


def test_noise_is_the_hash_of_seed_counter_and_token():
    seeds, counters = [0, 1, -1, 2**62, -(2**63), 2**63 - 1], [0, 1, 5, 100_000, 3, 2**40]
    ids = torch.tensor([[0, 1, 2, 31_999, 128_255, 2**31 - 1]])
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(counters), ids)
    expected = [[plain_noise(s, c, i) for i in ids[0].tolist()] for s, c in zip(seeds, counters, strict=True)]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_noise_has_a_gumbel_distribution_and_no_correlation_between_seeds_counters_and_tokens():
    ids = torch.arange(50_000)[None]
    keys = torch.tensor([[7, 0], [7, 1], [8, 0], [7, 2]])
    noise = gumbel_noise(keys[:, 0], keys[:, 1], ids).double()
    assert noise.isfinite().all()
    for quantile in (1e-3, 0.1, 0.5, 0.9, 0.999):
        share = (noise < -math.log(-math.log(quantile))).double().mean(1)
        assert ((share - quantile).abs() < 5 * math.sqrt(quantile * (1 - quantile) / 50_000)).all()
    # A correlation of n independent pairs has a standard deviation of n ** -0.5.
    assert (torch.corrcoef(noise).triu(1).abs() < 5 * 50_000**-0.5).all()
    assert abs(torch.corrcoef(torch.stack([noise[0, 1:], noise[0, :-1]]))[0, 1]) < 5 * 50_000**-0.5


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 5, 1.0),
        (1.0, 0, 0.8),
        (1.3, 7, 0.7),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-6),
        (1.0, 0, 1e-20),
    ],
)
@pytest.mark.parametrize("varied", ["seed", "counter"])
def test_tokens_are_drawn_with_their_probabilities(temperature, top_k, top_p, varied):
    logits = 1.5 * torch.randn(23, generator=torch.Generator().manual_seed(3))
    draws = 20_000
    rows = [(temperature, top_k, top_p, *((n, 4) if varied == "seed" else (4, n))) for n in range(draws)]
    tokens = sample(logits.expand(draws, -1), *columns(rows), restrict=top_k > 0 or top_p < 1)
    allowed = plain_allowed(logits.tolist(), temperature, top_k, top_p)
    probabilities = torch.zeros(23)
    probabilities[allowed] = (logits[allowed] / temperature).softmax(0)
    counts = tokens.bincount(minlength=23)
    assert not counts[probabilities == 0].any()
    deviation = (draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - draws * probabilities).abs() <= 5 * deviation).all()


@pytest.mark.quick("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_what_may_be_drawn_is_what_a_plain_implementation_says(dtype):
    generator = torch.Generator().manual_seed(0)
    settings = [(t, k, p) for t in (0.4, 1.0, 3.0) for k in (0, 1, 2, 40, 100) for p in (1.0, 0.95, 0.5, 0.01)]
    # Equal logits: those of lower ids come first.
    logits = torch.randn(len(settings), 40, generator=generator).mul(2).round(decimals=1).to(dtype)
    drawn = [set() for _ in settings]
    for counter in range(1500):
        tokens = sample(logits, *columns([(*setting, 11, counter) for setting in settings]))
        for row, token in enumerate(tokens.tolist()):
            drawn[row].add(token)
    for row, (temperature, top_k, top_p) in enumerate(settings):
        allowed = plain_allowed(logits[row].double().tolist(), temperature, top_k, top_p)
        assert drawn[row] <= set(allowed)
        weights = (logits[row].double()[allowed] / temperature).softmax(0)
        assert drawn[row] >= {i for i, weight in zip(allowed, weights.tolist(), strict=True) if weight > 0.01}


def test_a_row_draws_the_same_alone_and_in_any_company():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(16, 1000, generator=generator)
    rows = [(0.0 if n % 5 == 0 else 1.0 + n / 8, 3 * n * (n % 2), 1 - n / 20, 1000 + n, n) for n in range(16)]
    together = sample(logits, *columns(rows))
    order = torch.randperm(16, generator=generator)
    assert sample(logits[order], *columns([rows[n] for n in order])).equal(together[order])
    for n, row in enumerate(rows):
        assert sample(logits[n : n + 1], *columns([row])).equal(together[n : n + 1])
    assert together[0] == logits[0].argmax()


def test_without_restrictions_sorting_changes_nothing():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(2))
    arguments = columns([(1.5, 0, 1.0, n, 0) for n in range(64)])
    assert sample(logits, *arguments, restrict=False).equal(sample(logits, *arguments, restrict=True))


def test_greedy_takes_the_lowest_id_among_equals_whatever_the_other_fields_say():
    logits = torch.zeros(2, 50)
    logits[1, [20, 30]] = 4.0
    assert sample(logits, *columns([(0.0, 7, 0.3, 1, 1)] * 2)).tolist() == [0, 20]


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-37, 1e-39, 1e-44, 1e-46, 1e-300])
def test_near_zero_the_likeliest_token_is_taken(temperature, restricted):
    logits = torch.tensor([[1.0, 2.0, 3.0, 20.0, -1.0, -math.inf], [-9e4, -8e4, -9e4, -8e4 + 1, -math.inf, -1e30]])
    rows = columns([(temperature, 3 if restricted else 0, 1.0, seed, 0) for seed in (1, 2)])
    assert sample(logits, *rows, restrict=restricted).tolist() == [3, 3]


@pytest.mark.parametrize("temperature", [1e10, 3e38, 1e39, 1e300])
def test_far_above_one_what_is_allowed_is_drawn_alike(temperature):
    logits = torch.tensor([[1.0, 2.0, 3.0, 20.0, -math.inf]]).repeat(400, 1)

    def drawn(top_k, top_p, restrict=True):
        rows = columns([(temperature, top_k, top_p, seed, 0) for seed in range(400)])
        return Counter(sample(logits, *rows, restrict=restrict).tolist())

    two, half, four = drawn(2, 1.0), drawn(0, 0.5), drawn(0, 1.0, restrict=False)
    assert set(two) == set(half) == {2, 3}
    assert set(four) == {0, 1, 2, 3}
    assert min(two.values()) > 150
    assert min(half.values()) > 150
    assert min(four.values()) > 60


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-12, 0.1])
def test_a_tiny_top_p_leaves_the_likeliest_token(top_p):
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.9]]).repeat(50, 1)
    rows = columns([(1.0, 2**63 - 1, top_p, seed, 0) for seed in range(50)])
    assert set(sample(logits, *rows).tolist()) == {2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e39, 1.7e308])
def test_an_engine_takes_every_temperature(temperature):
    engine = Engine(FakeModel())
    sampling = Sampling(temperature=temperature, top_k=1, seed=3)
    request = engine.add([1, 2, 3], max_new_tokens=5, sampling=sampling, stop_token_ids=[])
    greedy = engine.add([1, 2, 3], max_new_tokens=5, stop_token_ids=[])
    engine.run()
    assert request.tokens == greedy.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": 2**63},
        {"seed": 0.5},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("sigma", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_decide_as_the_whole_vocabulary_does(sigma, dtype):
    rows = [(0.0, 0, 0.9), (1.0, 5, 1.0), (0.5, 0, 0.9), (2.0, 100, 0.5), (1.0, 5000, 0.99), (1e-30, 3, 1.0)]
    rows += [(1.0, 0, 1.0), (0.7, 1, 0.3), (1.0, 0, 0.01), (0.3, CANDIDATES, 1.0), (1.0, CANDIDATES - 1, 1.0)]
    given = columns([(*row, seed, 3) for seed, row in enumerate(rows)])
    found = []
    for seed in range(5):
        logits = torch.randn(len(rows), 4 * CANDIDATES + 1, generator=torch.Generator().manual_seed(seed)) * sigma
        if seed == 4:
            logits = logits.round()  # many equal ones
        logits = logits.to(dtype)
        few = sample_likeliest(logits, *given)
        expected = sample_reference(logits, *given, restrict=True)
        assert few[few >= 0].equal(expected[few >= 0])
        assert sample(logits, *given).equal(expected)
        found.append(few >= 0)
    known = torch.stack(found)
    assert known[:, [0, 1, 7, 8]].all()
    assert not known[:, [4, 6, 9]].any()
