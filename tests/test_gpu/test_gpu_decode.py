"""The fused decode kernel agrees with float64 attention over the same stored tokens."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, compare

from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.decode import PageTables, ResidualWindows, unsupported
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.decode.triton.launch import decode_attention
from kvconvert.kernels.pages import LayerFormat, PageFormat
from kvconvert.kernels.spans import SpanFormat, quantize_span, shift_extremes, span_keys, span_values

# Largest error of an output number relative to the outputs' RMS. Weights are rounded to fp16 before they meet values
# (2^-11 each), bf16 weights of full-precision tokens and bf16 outputs to 8 bits.
TOLERANCE = {torch.float32: 4e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}

SMALL = {"heads": 1, "pages": (1, 1), "residual": (3, 0), "half_quantized_pages": (0, 0)}
SHORT = (
    Case(norm="joint"),
    Case(norm="per_head", key_group=32, value_group=32, group=1, dtype=torch.float16),
    Case(heads=1, key_bits=1, value_bits=1, pages=(1, 2), residual=(0, 5), half_quantized_pages=(0, 0)),
    Case(key_bits=4, value_bits=8, key_group=16, value_group=32, **{**SMALL, "residual": (1, 0)}),
    Case(heads=1, boosted=16, norm="none", dtype=torch.bfloat16),
    Case(heads=1, key_bits=16, value_bits=2, key_dim=64, value_dim=48, value_group=24, group=3),
    Case(key_bits=2, value_bits=16, half_quantized=1, half_quantized_pages=(1, 0, 2), dtype=torch.float16),
    Case(heads=1, half_quantized=2, half_quantized_pages=(1, 0, 2), key_dim=80, value_dim=96, value_group=16),
    Case(queries=3, masked=True, group=2, softcap=5.0, sink_logits=True),
)
HALVES = {"heads": 1, "half_quantized_pages": (2, 1, 3), "pages": (1, 0, 0), "residual": (9, 4, 77)}
HIDING = (
    Case(hides=True, heads=1, pages=(3, 1, 0), residual=(40, 4, 9)),
    Case(hides=True, half_quantized=1, **HALVES),
    Case(hides=True, heads=1, queries=3, masked=True, group=2, sink_tokens=32, residual=(40, 33, 0), programs=5),
)
THREE_BITS = (
    Case(key_bits=3, value_bits=3, key_dim=64, value_dim=64, value_group=64, norm="joint", **SMALL),
    Case(key_bits=2, value_bits=3, key_dim=48, value_dim=96, key_group=32, value_group=48, **SMALL),
    Case(key_bits=4, value_bits=3, key_dim=96, value_dim=48, value_group=24, dtype=torch.float16, **SMALL),
)
BYTES = (
    Case(scale_bits=8, key_bits=1, value_bits=1, key_dim=64, value_dim=64, value_group=64, **SMALL),
    Case(scale_bits=8, key_bits=3, value_bits=2, value_group=32, key_group=32, dtype=torch.float16, **SMALL),
    Case(scale_bits=8, key_bits=2, value_bits=4, boosted=16, dtype=torch.bfloat16, **SMALL),
)
WIDE = (
    Case(hides=True, key_bits=16, value_bits=16, dtype=torch.bfloat16),
    Case(hides=True, half_quantized=2, **HALVES),
    Case(scale_bits=8, norm="joint", dtype=torch.bfloat16),
    Case(key_bits=3, value_bits=2, norm="joint", dtype=torch.bfloat16, **SMALL),
    *(Case(key_bits=bits, value_bits=bits, norm="joint" if bits < 16 else "none") for bits in (1, 2, 3, 4, 8, 16)),
    *(Case(key_bits=k, value_bits=v, **SMALL) for b in (1, 2, 4, 8, 16) for k, v in ((3, b), (b, 3))),
    *(Case(key_bits=3, value_bits=3, key_dim=d, value_dim=d, value_group=d, **SMALL) for d in (8, 48, 80, 96, 256)),
    *(Case(key_bits=3, value_bits=3, half_quantized=h, half_quantized_pages=(1, 0, 2)) for h in (1, 2)),
    *(Case(key_dim=d, value_dim=d, value_group=g) for d, g in ((48, 24), (64, 32), (80, 16), (96, 32), (256, 128))),
    *(Case(group=g, heads=1, dtype=t) for g in (1, 2, 5, 8, 16) for t in (torch.float16, torch.bfloat16)),
    *(Case(key_group=g, value_group=g, key_bits=b, value_bits=b) for g in (16, 32, 64) for b in (1, 2, 3, 4, 8)),
    *(Case(boosted=b, fixed_channels=f, key_bits=k) for b, f, k in ((5, False, 2), (32, True, 4))),
    *(Case(static=True, key_bits=k, value_bits=v) for k, v in ((4, 4), (8, 8), (8, 16), (16, 4))),
    *(
        Case(pages=(p,), residual=(t,), half_quantized_pages=(0,))
        for p, t in ((0, 1), (0, 63), (0, 129), (1, 0), (9, 127))
    ),
    *(Case(queries=q, masked=True, group=g) for q, g in ((1, 4), (2, 7), (9, 1), (63, 2))),
)


@pytest.mark.parametrize("case", [*SHORT, *THREE_BITS, *HIDING, *BYTES], ids=str)
def test_it_equals_float64_attention(case, device):
    error, _ = compare(case, device)
    assert error < TOLERANCE[case.dtype]


@pytest.mark.full
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_it_equals_float64_attention_everywhere(case, device):
    error, _ = compare(case, device)
    assert error < TOLERANCE[case.dtype]


def test_how_work_is_divided_changes_rounding_only(device):
    case = Case(heads=1, pages=(2, 1, 0), norm="joint")
    few, many = (compare(replace(case, programs=programs), device)[1] for programs in (1, 40))
    # Each part rounds its weights to fp16 relative to its own maximum.
    torch.testing.assert_close(few, many, atol=4e-3, rtol=0)


@pytest.mark.parametrize(
    ("bits", "tau", "heads"),
    [(1, (0.4, 1.5), 1), *(pytest.param(bits, (0.0, 0.0), 2, marks=pytest.mark.full) for bits in (2, 3))],
)
def test_spans_of_several_prompts_are_shifted_together(bits, tau, heads, device):
    group, dim, scaling = 2, 32, 0.15
    lengths, residuals = ((129, 40), (30,)), (17, 0)
    form = SpanFormat(bits, bits, tau1=tau[0], tau2=tau[1])
    generator = torch.Generator().manual_seed(3)

    def random(*size):
        return torch.randn(*size, generator=generator)

    spans = [[quantize_span(random(heads, n, dim), random(heads, n, dim), form) for n in row] for row in lengths]
    sides = [side for row in spans for span in row for side in (span.keys, span.values)]
    parts = [tensor.to(device).contiguous() for side in sides for tensor in side]
    base = torch.zeros(8, dtype=torch.int16, device=device)
    keys, values, shared, sequences = [], [], [], []
    each = iter(parts)
    for row, residual in zip(spans, residuals, strict=True):
        segments, first = [], 0
        for span in row:
            key_codes, key_scale, key_offset, value_codes, value_scale, value_offset = (next(each) for _ in range(6))
            blocks, begin = key_codes.shape[0], len(keys)
            for table, codes in ((keys, key_codes), (values, value_codes)):
                start, step = codes.data_ptr() - base.data_ptr(), codes[0].numel() * 2
                table += [(start + i * step) // 16 for i in range(blocks)]
            segments.append(Segment(begin, begin + blocks, span.tokens, len(shared), first))
            first += span.tokens
            scales = (key_scale, key_offset, value_scale, value_offset)
            shared.append([(t.data_ptr() - base.data_ptr()) // 16 for t in scales])
        sequences.append(SequencePlan(tuple(segments), residual, residual_token=first))
    buffers = [[random(heads, 24, dim).to(device) for _ in range(2)] for _ in residuals]
    residual_base = torch.zeros(8, device=device)
    rows = torch.zeros(len(residuals), 8, dtype=torch.int64)
    for row, residual in enumerate(residuals):
        for side, buffer in enumerate(buffers[row]):
            rows[row, 2 * side] = (buffer.data_ptr() - residual_base.data_ptr()) // 32
            rows[row, 2 * side + 1] = buffer.stride(0) // 8
        rows[row, 7] = residual
    queries = random(len(residuals), heads * group, 1, dim)
    tables = PageTables(
        base, base, torch.tensor([*keys, 0], device=device), torch.tensor([*values, 0], device=device),
        plan_work(sequences, 3).to(device), torch.tensor(shared, device=device),
    )  # fmt: skip
    format = LayerFormat(
        PageFormat.keys(heads, dim, 128, bits, 128, static=True),
        PageFormat.values(heads, dim, 128, bits, dim, static=True),
        span=form,
    )
    counter = torch.zeros((), dtype=torch.int64, device=device)
    windows = ResidualWindows(residual_base, rows.to(device))
    out = decode_attention(queries.to(device), tables, windows, format, Scoring(scaling), clamped_rows=counter)
    for row, residual in enumerate(residuals):
        key = torch.cat([span_keys(s, form) for s in spans[row]], 1).double()
        value = torch.cat([span_values(s, form) for s in spans[row]], 1).double()
        q = queries[row, :, 0].double().unflatten(0, (heads, group))
        scores = shift_extremes(q @ key.transpose(1, 2) * scaling, *tau)
        residual_keys, residual_values = (b.double().cpu()[:, :residual] for b in buffers[row])
        scores = torch.cat([scores, q @ residual_keys.transpose(1, 2) * scaling], -1)
        want = scores.softmax(-1) @ torch.cat([value, residual_values], 1)
        torch.testing.assert_close(
            out[row, :, 0].double().cpu().unflatten(0, (heads, group)), want, atol=4e-3, rtol=4e-3
        )
    assert int(counter) == 0


def test_no_token_at_all_gives_zeros(device):
    case = Case(pages=(0, 0), residual=(0, 3), half_quantized_pages=(0, 0))
    _, out = compare(case, device)
    assert not out[0].any()


USUAL = PageFormat.keys(2, 64, 128, 2, 128)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (PageFormat.keys(2, 288, 128, 2, 128), "288 channels"),
        (PageFormat.keys(2, 64, 128, 1, 128, boosted=8), "boosted channels of 1-bit keys"),
    ],
)
def test_what_it_cannot_do_is_named(keys, reason, device):
    format = LayerFormat(keys, PageFormat.values(2, 64, 128, 2, 64))
    queries = torch.zeros(1, 8, 1, keys.head_dim, device=device, dtype=torch.float16)
    assert reason in unsupported(queries, format, torch.float16)
    assert "queries are torch.float16" in unsupported(queries, replace(format, keys=USUAL), torch.bfloat16)
    assert unsupported(queries, replace(format, keys=USUAL), torch.float16) is None
    assert "no kernels for meta" in unsupported(queries.to("meta"), format, torch.float16)


def test_the_reference_itself_is_softmax_attention():
    keys, values = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    want = torch.softmax(keys.double() @ keys.double().transpose(1, 2), -1) @ values.double()
    torch.testing.assert_close(attention_reference(keys, keys, values, None, 1.0).output, want)
