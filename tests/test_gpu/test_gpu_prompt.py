"""The prompt's attention kernels against float64, on a GPU or under the interpreter."""

import pytest
import torch
from tiny.attention import repeated_by_reference

from kvconvert.errors import UsageError
from kvconvert.kernels import device as gpu_device
from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.prompt import prompt_attention, unsupported
from kvconvert.kernels.prompt import triton as kernels
from kvconvert.kernels.select import column_sums, repeated_attention, selective_attention

# Relative errors of the whole output: weights and outputs are rounded to the dtype once each.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(device, heads, key_heads, length, tokens, size, value_size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, length, size), (key_heads, tokens, size), (key_heads, tokens, value_size))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def causal(length, tokens, window, device):
    own, columns = torch.arange(tokens - length, tokens).unsqueeze(1), torch.arange(tokens)
    return ((columns <= own) & (columns > own - (window or tokens))).to(device)


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def check(tensors, scaling=0.2, softcap=None, sink_logits=None, window=None, tilings=(None, None), tolerance=1e-5):
    queries, keys, _ = tensors
    visible = causal(queries.shape[1], keys.shape[1], window, queries.device)
    output, log_sum_exp = kernels.attention(*tensors, Scoring(scaling, softcap, sink_logits, window), tiling=tilings[0])
    assert output.dtype == queries.dtype
    assert (
        relative(output, attention_reference(*tensors, visible, scaling, softcap, sink_logits).output)
        < TOLERANCE[queries.dtype]
    )
    sums = kernels.column_sums(queries, keys, log_sum_exp, Scoring(scaling, softcap=softcap, window=window), tilings[1])
    expected = attention_reference(queries, keys, None, visible, scaling, softcap, sink_logits).mass
    assert sums.dtype == torch.float32
    assert relative(sums, expected) < tolerance


SMALL = kernels.Tiling(16, 32, 4, 2), kernels.Tiling(32, 64, 4, 2)

SHAPES = [  # query heads, KV heads, T, n, D, E
    (1, 1, 1, 1, 64, 64),
    (2, 1, 63, 63, 48, 48),
    (4, 2, 129, 129, 64, 80),
    (2, 2, 63, 200, 80, 96),
    (4, 1, 17, 300, 96, 64),
    (2, 2, 17, 129, 128, 256),
    (2, 1, 70, 129, 256, 128),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_output_and_sums_on_awkward_shapes(device, shape):
    check(inputs(device, *shape, torch.float16))


def test_sixteen_query_heads_share_a_key_head(device):
    check(inputs(device, 16, 1, 1, 129, 16, 16, torch.float16), tilings=SMALL)


@pytest.mark.parametrize(
    "extras",
    [
        *(pytest.param(extras, marks=pytest.mark.full) for extras in ({}, {"softcap": 3.0})),
        *({"window": 33, "sink_logits": True}, {"softcap": 3.0, "sink_logits": True, "window": 140}),
    ],
    ids=str,
)
def test_caps_sink_logits_and_windows(device, extras):
    sink_logits = torch.linspace(-2, 4, 2).to(device) if "sink_logits" in extras else None
    tensors = inputs(device, 2, 1, 150, 290, 64, 64, torch.bfloat16)
    tilings = kernels.Tiling(128, 64, 8, 2), kernels.Tiling(64, 128, 8, 2)
    check(tensors, 0.25, extras.get("softcap"), sink_logits, extras.get("window"), tilings)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "window", [1, 65, 199, *(pytest.param(window, marks=FULL) for window in (16, 63, 64, 129, 200))]
)
def test_windows_of_every_relation_to_the_tiles(device, window):
    tensors = inputs(device, 1, 1, 140, 200, 16, 16, torch.float16)
    check(tensors, window=window, tilings=(kernels.Tiling(64, 32, 4, 2), kernels.Tiling(32, 64, 4, 2)))


@pytest.mark.parametrize(("length", "tokens"), [(1, 64), (15, 127), (16, 80), (17, 65), (33, 64)])
def test_every_offset_of_a_chunk(device, length, tokens):
    tensors = inputs(device, 2, 1, length, tokens, 16, 16, torch.float16)
    check(tensors, tilings=(kernels.Tiling(16, 16, 4, 2), kernels.Tiling(32, 16, 4, 2)))


def test_tiles_copied_by_descriptors_give_the_same(device):
    tilings = kernels.Tiling(64, 32, 4, 2, True), kernels.Tiling(32, 64, 4, 2, True, in_registers=True)
    check(inputs(device, 4, 2, 70, 100, 48, 80, torch.float16), tilings=tilings)


def test_every_number_is_written(device, monkeypatch):
    """Buffers start as NaN, so that a number the kernels leave out would show."""

    def poisoned(allocate):
        return lambda *shape, **options: allocate(*shape, **options).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    tensors = inputs(device, 4, 2, 33, 130, 48, 80, torch.float16)
    output, log_sum_exp = kernels.attention(*tensors, Scoring(0.2))
    sums = kernels.column_sums(*tensors[:2], log_sum_exp, Scoring(0.2))
    assert all(torch.isfinite(x).all() for x in (output, log_sum_exp, sums))


def test_all_weights_of_the_queries_are_in_the_attention_mass(device):
    queries, keys, values = inputs(device, 4, 2, 100, 130, 64, 64, torch.float16)
    _, mass = selective_attention(queries, keys, values, Scoring(0.2))
    torch.testing.assert_close(mass.sum(1).cpu(), torch.full((2,), 200.0), rtol=1e-5, atol=0)
    sink_logits = torch.linspace(-1, 5, 4).to(device)
    _, mass = selective_attention(queries, keys, values, Scoring(0.2, sink_logits=sink_logits))
    without_values, log_sum_exp = kernels.attention(queries, keys, None, Scoring(0.2, sink_logits=sink_logits))
    assert without_values is None
    given = 100 - (sink_logits[:, None] - log_sum_exp).exp().sum(1)
    torch.testing.assert_close(mass.sum(1), given.unflatten(0, (2, 2)).sum(1), rtol=1e-5, atol=0)


def test_strided_inputs_are_read_in_place_or_copied(device):
    queries, keys, values = inputs(device, 2, 2, 40, 40, 64, 64, torch.float16)
    expected = kernels.attention(queries, keys, values, Scoring(0.2))[0]
    token_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (queries, keys, values)]
    assert torch.equal(kernels.attention(*token_first, Scoring(0.2))[0], expected)
    odd = [torch.cat([x.new_zeros(x.shape[0], 40, 1), x], 2)[:, :, 1:] for x in (queries, keys, values)]
    assert torch.equal(kernels.attention(*odd, Scoring(0.2))[0], expected)


def test_large_scores_neither_overflow_nor_vanish(device):
    queries, keys, values = inputs(device, 2, 1, 40, 40, 64, 64, torch.float16)
    # Scores of 1e4, of which float32 keeps 1e-3: so much of a weight is lost.
    check((queries * 30, keys * 30, values), 0.5, tolerance=1e-3)
    check((queries * 30, keys * 30, values), 0.5, softcap=4.0)


def test_what_the_kernels_cannot_do_runs_on_the_reference_path_with_one_warning(device, caplog):
    gpu_device.fallbacks.clear()
    queries, keys, values = (x.float() for x in inputs(device, 2, 1, 20, 33, 64, 64, torch.float16))
    for _ in range(2):
        output, mass = selective_attention(queries, keys, values, Scoring(0.2))
    visible = causal(20, 33, None, queries.device)
    torch.testing.assert_close(
        output.double(), attention_reference(queries, keys, values, visible, 0.2).output, rtol=1e-3, atol=1e-3
    )
    exact = attention_reference(queries, keys, values, visible, 0.2)
    torch.testing.assert_close(mass.double(), exact.mass, rtol=1e-3, atol=1e-3)
    assert len([r for r in caplog.records if "float32 is neither" in r.message]) == 2  # one of each operation
    assert sum(gpu_device.fallbacks.values()) == 4


def test_plain_prompts_that_the_kernels_cannot_serve_get_right_answers_too(device):
    queries, keys, values = (x.float() for x in inputs(device, 4, 2, 33, 33, 64, 64, torch.float16))
    visible = causal(33, 33, None, queries.device)
    output, _ = prompt_attention(queries, keys, values, Scoring(0.2))
    expected = attention_reference(queries, keys, values, visible, 0.2).output
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-3)


def test_the_dispatch_takes_the_kernels(device, monkeypatch):
    gpu_device.fallbacks.clear()
    queries, keys, values = inputs(device, 2, 1, 20, 33, 64, 64, torch.float16)
    expected = kernels.attention(queries, keys, values, Scoring(0.2))
    assert torch.equal(prompt_attention(queries, keys, values, Scoring(0.2))[0], expected[0])
    sums = kernels.column_sums(queries, keys, expected[1], Scoring(0.2))
    assert torch.equal(column_sums(queries, keys, None, Scoring(0.2)), sums)
    assert torch.equal(selective_attention(queries, keys, values, Scoring(0.2))[1], sums)
    assert not gpu_device.fallbacks


def test_what_the_kernels_do_not_serve_has_a_reason(device):
    queries, keys, values = inputs(device, 2, 1, 20, 33, 64, 64, torch.float16)
    assert unsupported(queries, keys, values, 0.2) is None
    for arguments, message in [
        ((queries.float(), keys, values, 0.2), "float32"),
        ((queries, keys.bfloat16(), values, 0.2), "differ in dtype"),
        ((queries[..., :12], keys[..., :12], values, 0.2), "size 12"),
        ((queries, keys, values, -1.0), "not positive"),
        ((queries.to("meta"), keys, values, 0.2), "no kernels for meta"),
    ]:
        assert message in unsupported(*arguments)


def test_misuse_is_refused_by_name(device):
    queries, keys, values = inputs(device, 2, 1, 20, 33, 64, 64, torch.float16)
    with pytest.raises(UsageError, match="do not belong together"):
        kernels.attention(queries, keys[:, :10], values[:, :10], Scoring(0.2))
    with pytest.raises(UsageError, match="window of 0"):
        kernels.attention(queries, keys, values, Scoring(0.2, window=0))
    with pytest.raises(UsageError, match="log-sum-exp"):
        kernels.column_sums(queries, keys, torch.zeros(2, 19, device=device), Scoring(0.2))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("length", "tokens"), [(1, 129), (63, 63), (129, 200)])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_the_wide_sweep(device, dtype, size, length, tokens, group):
    check(inputs(device, 2 * group, 2, length, tokens, size, size, dtype))
    sink_logits = torch.linspace(-2, 2, 2 * group).to(device)
    check(inputs(device, 2 * group, 2, length, tokens, size, size, dtype, 1), 0.3, 4.0, sink_logits, 40)


@pytest.mark.each_value
@pytest.mark.parametrize("window", [None, 40, 90, 300])
@pytest.mark.parametrize(
    ("length", "tokens", "first_query"), [(70, 100, 100), (70, 100, 131), (40, 33, 60), (9, 20, 15)]
)
def test_keys_that_lie_before_the_queries(device, length, tokens, first_query, window):
    queries, keys, values = inputs(device, 4, 2, length, tokens, 48, 80, torch.float16)
    own, columns = torch.arange(first_query, first_query + length).unsqueeze(1), torch.arange(tokens)
    visible = ((columns <= own) & (columns > own - (window or own + 1))).to(device)
    for tiling in (None, SMALL[0]):
        output, log_sum_exp = kernels.attention(
            queries, keys, values, Scoring(0.2, window=window), tiling=tiling, first_query=first_query
        )
        seen = visible.any(1)
        expected = attention_reference(queries, keys, values, visible, 0.2).output
        scores = (queries.double() @ keys.double().repeat_interleave(2, 0).transpose(1, 2) * 0.2).masked_fill(
            ~visible, float("-inf")
        )
        if seen.any():
            assert relative(output, expected) < TOLERANCE[torch.float16]
        assert not output[:, ~seen].any()
        torch.testing.assert_close(log_sum_exp.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("length", [1, 150, 64])
@pytest.mark.parametrize(("start", "sinks"), [(0, 0), (70, 4)])
@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float16, None), (torch.bfloat16, 5.0)])
def test_a_repeated_prompt_is_attended_to_and_scored(device, length, start, sinks, dtype, softcap):
    queries, keys, values = inputs(device, 6, 2, length, start + length + 9, 32, 48, dtype)
    queries = queries.unflatten(0, (2, 3))
    repeated, scoring = [part.flip(1)[:, :length] for part in (keys, values)], Scoring(0.2, softcap)
    arguments = queries, repeated, (keys, values), start, 64, sinks, scoring
    output, scores = repeated_attention(*arguments)
    expected = repeated_by_reference(*arguments)
    assert (output.dtype, scores.dtype) == (dtype, torch.float32)
    assert relative(output, expected[0]) < TOLERANCE[dtype]
    assert relative(scores, expected[1]) < 1e-5
