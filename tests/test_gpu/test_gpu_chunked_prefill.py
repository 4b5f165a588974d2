"""Prompt chunks over stored tokens against float64, with kernels on a GPU or under the interpreter."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, Stored

from kvconvert.errors import UsageError
from kvconvert.kernels import chunked_prefill
from kvconvert.kernels.attention import Scoring, attention_reference, causal_mask, merge
from kvconvert.kernels.chunked_prefill import StoredPart, chunk_attention
from kvconvert.kernels.chunked_prefill import triton as launch
from kvconvert.kernels.chunked_prefill.triton import merge_partials
from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses

# Chunks of prompts over every kind of history are in the default run: tests/test_gpu/test_gpu_prompt_chunks.py.
pytestmark = pytest.mark.full

FULL = pytest.mark.full
# Relative errors of the whole output: dequantized tokens, weights and partial outputs are rounded to the dtype, which
# the interpreter does by truncation for bfloat16.
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 2e-2}


def chunk_of(case: Case, device: torch.device, seed: int = 5) -> list[torch.Tensor]:
    """Queries, keys and values of a chunk of `case.queries` tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((case.heads * case.group, case.key_dim), (case.heads, case.key_dim), (case.heads, case.value_dim))
    return [torch.randn(h, case.queries, dim, generator=generator).to(device, case.dtype) for h, dim in shapes]


def parts_of(stored: Stored, row: int = 0) -> list[StoredPart]:
    """What row `row` has stored: pages, half-quantized pages, full-precision tokens."""
    case, tables = stored.case, stored.tables()
    counts = [p + h for p, h in zip(case.pages, case.half_quantized_pages, strict=True)]
    first, pages, half = sum(counts[:row]), case.pages[row], case.half_quantized_pages[row]
    sinks, key_rest, value_rest, residual = stored.rows[row, 4:8].tolist()
    sides = []
    for side, (base, offsets, f) in enumerate(
        ((tables.key_base, tables.keys, stored.format.keys), (tables.value_base, tables.values, stored.format.values))
    ):
        scales = None if tables.shared is None else tables.shared[0, 2 * side : 2 * side + 2]
        every = PageAddresses(f, base, offsets[first:], scales, tables.boosted if side == 0 else None)
        buffer, rest = stored.buffers[row][side], (key_rest, value_rest)[side]
        in_pages = half and not rest
        middle = every.select(slice(pages, pages + half)) if in_pages else buffer[:, sinks : sinks + rest]
        tail = buffer[:, sinks + rest : rest + residual]
        sides.append((every.select(slice(0, pages)), middle, buffer[:, :sinks], tail))
    tokens = (pages * PAGE_SIZE, half * PAGE_SIZE, sinks, residual - sinks)
    return [StoredPart(n, k, v) for n, k, v in zip(tokens, *sides, strict=True) if n]


def expected_of(stored, row, queries, keys, values, scaling, softcap=None, sink_logits=None, window=None):
    """Attention in float64 over everything dequantized to the dtype."""
    every = [
        torch.cat([tokens.to(stored.case.dtype).to(queries.device), own], 1)
        for tokens, own in zip(stored.sequences[row], (keys, values), strict=True)
    ]
    visible = causal_mask(queries.shape[1], every[0].shape[1], window, queries.device)
    return attention_reference(queries, *every, visible, scaling, softcap, sink_logits).output


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


HALF = torch.float16
CASES = [
    Case(key_group=32, value_group=32, norm="joint", dtype=torch.bfloat16, queries=70),
    Case(key_dim=64, value_dim=64, value_group=64, boosted=8, dtype=HALF, queries=33),
    Case(key_dim=80, value_dim=48, value_group=48, dtype=HALF, queries=17, group=1, heads=3),
    Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=40, half_quantized=1,
         half_quantized_pages=(2, 0, 0)),
    Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=40, half_quantized=2,
         half_quantized_pages=(1, 0, 0), sink_tokens=0),
    Case(key_dim=64, value_dim=64, static=True, key_bits=4, value_bits=8, dtype=HALF, queries=129, group=2),
    Case(key_dim=48, value_dim=48, value_group=48, key_bits=16, value_bits=1, dtype=HALF, queries=20,
         residual=(0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("workspace_tokens", [128, pytest.param(256, marks=FULL), 1024])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_over_pages_and_full_precision_tokens(device, case, workspace_tokens):
    stored, chunk = Stored(case, device), chunk_of(case, device)
    parts = parts_of(stored)
    output = chunk_attention(*chunk[:1], parts, *chunk[1:], Scoring(case.scaling), workspace_tokens=workspace_tokens)
    assert output.dtype == case.dtype
    expected = expected_of(stored, 0, *chunk, case.scaling)
    assert relative(output, expected) < TOLERANCE[case.dtype]


EXTRAS = [
    {"softcap": 3.0},
    {"sink_logits": True},
    {"window": 30},
    {"window": 100, "sink_logits": True},
    {"window": 290, "softcap": 4.0, "sink_logits": True},
    {"window": 4000},
]


@pytest.mark.parametrize("workspace_tokens", [128, 1024])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_caps_sink_logits_and_windows(device, extras, workspace_tokens):
    case = Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=60, group=2, sink_tokens=0)
    stored, chunk = Stored(case, device), chunk_of(case, device)
    extras = extras | ({"sink_logits": torch.linspace(-2, 4, 4).to(device)} if "sink_logits" in extras else {})
    parts = parts_of(stored)
    output = chunk_attention(
        *chunk[:1], parts, *chunk[1:], Scoring(case.scaling, **extras), workspace_tokens=workspace_tokens
    )
    expected = expected_of(stored, 0, *chunk, case.scaling, **extras)
    assert relative(output, expected) < TOLERANCE[HALF]


def test_without_a_history_a_chunk_attends_to_itself(device):
    case = Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=50, pages=(0, 0, 0), residual=(0, 0, 0))
    queries, keys, values = chunk_of(case, device)
    expected = attention_reference(queries, keys, values, causal_mask(50, 50, device=device), 0.2).output
    assert relative(chunk_attention(queries, [], keys, values, Scoring(0.2)), expected) < TOLERANCE[HALF]


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_torchs_operators_serve_whole_tiles(device, backend, monkeypatch):
    """Without a GPU, torch's operator for CPUs stands in for those of GPUs."""
    tiles = []
    if device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def stand_in(name, queries, keys, values, scaling):
            tiles.append((name, keys.shape[1]))
            output, log_sum_exp = flash(queries[None], keys[None], values[None], scale=scaling)
            return output[0], log_sum_exp[0].contiguous()

        monkeypatch.setattr(launch, "_torch_attention", stand_in)
    case = Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=33, pages=(5, 0, 0), residual=(40, 0, 0))
    stored, (queries, keys, values) = Stored(case, device), chunk_of(case, device)
    arguments = (queries, parts_of(stored), keys, values)
    expected = expected_of(stored, 0, queries, keys, values, case.scaling)
    output = chunk_attention(*arguments, Scoring(case.scaling), backend=backend, workspace_tokens=256)
    assert relative(output, expected) < TOLERANCE[HALF]
    assert tiles == ([(backend, 256)] * 2 if device.type == "cpu" else [])
    if backend == "flash":  # Under a soft cap all of it takes the kernels that know one.
        capped = chunk_attention(*arguments, Scoring(case.scaling, 3.0), backend=backend, workspace_tokens=256)
        assert relative(capped, expected_of(stored, 0, queries, keys, values, case.scaling, 3.0)) < TOLERANCE[HALF]
        assert len(tiles) == 2 * (device.type == "cpu")


def test_every_number_is_written_and_nothing_else_is_read(device, monkeypatch):
    """Buffers start as NaN, so that a number that is left out, or read before it is there, would show."""

    def poisoned(allocate):
        def filled(*shape, **options):
            tensor = allocate(*shape, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    case = Case(key_dim=64, value_dim=48, value_group=48, dtype=HALF, queries=45, pages=(3, 0, 0))
    stored, (queries, keys, values) = Stored(case, device), chunk_of(case, device)
    parts = parts_of(stored)
    expected = expected_of(stored, 0, queries, keys, values, case.scaling)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    for workspace_tokens in (128, 1024):
        output = chunk_attention(queries, parts, keys, values, Scoring(case.scaling), workspace_tokens=workspace_tokens)
        assert relative(output, expected) < TOLERANCE[HALF]


@pytest.mark.parametrize("size", [48, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_merges_of_results_of_any_layout(device, size, dtype):
    heads, group, length = 2, 3, 37
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(heads, length, group, size, generator=generator).to(device, dtype).transpose(1, 2)
    second = torch.randn(group, length, heads, size, generator=generator).to(device, dtype).permute(2, 0, 1, 3)
    sums = [torch.randn(heads, group, length, generator=generator).to(device) * 30 for _ in range(2)]
    sums[0][0, 0, :5] = sums[1][0, 0, 3:8] = float("-inf")
    first, second = first.clone(memory_format=torch.preserve_format), second.clone(memory_format=torch.preserve_format)
    first[0, 0, :5], second[0, 0, 3:8] = 0.0, 0.0  # what attention gives a query that sees nothing
    expected, expected_sum = merge(first, sums[0], second, sums[1])
    output = torch.full((heads, group, length, size), float("nan"), device=device)
    merge_partials(first, sums[0], second, sums[1], output, sums[0])
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums[0], expected_sum, rtol=1e-5, atol=1e-5)
    assert not output[0, 0, 3:5].any()


def test_the_memory_of_a_call_does_not_grow_with_the_history(device, monkeypatch):
    case = Case(heads=1, group=1, key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=20, residual=(40, 0, 0))
    allocate, largest = torch.empty, []

    def counted(*shape, **options):
        tensor = allocate(*shape, **options)
        largest[-1] += tensor.nbytes
        return tensor

    for pages in (8, 24):
        stored, (queries, keys, values) = Stored(replace(case, pages=(pages, 0, 0)), device), chunk_of(case, device)
        parts = parts_of(stored)
        largest.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", counted)
            chunk_attention(queries, parts, keys, values, Scoring(case.scaling), workspace_tokens=512)
    # Workspace and float32 sums once; of every tile's attention the log-sum-exp is new.
    workspace = 2 * 512 * 64 * 2
    assert workspace <= largest[0] <= largest[1] <= workspace + 20 * 64 * 4 + 8 * 20 * 4


def test_a_workspace_without_room_for_a_page_is_an_error(device):
    case = Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, queries=20)
    stored, (queries, keys, values) = Stored(case, device), chunk_of(case, device)
    with pytest.raises(UsageError, match="no room for a page"):
        chunk_attention(queries, parts_of(stored), keys, values, Scoring(0.1), workspace_tokens=100)


def test_what_is_not_served_is_named(device):
    stored = Stored(Case(dtype=HALF), device)
    queries = torch.zeros(2, 8, 20, 128, dtype=HALF, device=device)
    assert chunked_prefill.unsupported(queries, stored.format, HALF, Scoring(0.1, softcap=30.0, window=100)) is None
    assert "float32" in chunked_prefill.unsupported(queries.float(), stored.format, torch.float32, Scoring(0.1))
    assert "differ in dtype" in chunked_prefill.unsupported(queries, stored.format, torch.bfloat16, Scoring(0.1))
    assert "positive" in chunked_prefill.unsupported(queries, stored.format, HALF, Scoring(-0.1))
