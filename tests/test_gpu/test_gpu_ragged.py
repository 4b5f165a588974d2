"""Chunks of several prompts in one launch against float64, with kernels on a GPU or under the interpreter."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, Stored

from kvconvert.kernels.attention import Scoring, attention_reference, causal_mask
from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses
from kvconvert.kernels.ragged import COPIED_TOKENS, TILE_QUERIES, RaggedTables, append, attend, unsupported
from kvconvert.kernels.rotate import NO_ROTATION, Rotations, hadamard_transform

FULL = pytest.mark.full
HALF, BRAIN = torch.float16, torch.bfloat16
# Relative errors of the whole output: dequantized tokens, weights and outputs are rounded to the dtype, which the
# interpreter does by truncation for bfloat16.
TOLERANCE = {HALF: 1.5e-3, BRAIN: 2e-2}


class Pass:
    """New tokens of several sequences beside what these have stored, and the tables of a pass over them.

    The pass has `spare` tokens more, which are no sequence's, and every table has entries that do nothing.
    """

    def __init__(self, case: Case, lengths: tuple[int, ...], device: torch.device, spare: int = 3):
        self.case, self.lengths, self.device = case, lengths, device
        self.stored = stored = Stored(case, device)
        generator, count = torch.Generator().manual_seed(5), sum(lengths) + spare
        heads = case.heads, case.heads, case.heads * case.group
        shapes = zip(heads, (case.key_dim, case.value_dim, case.key_dim), strict=True)
        # As a model's projections give them: token after token.
        drawn = [torch.randn(1, count, h, dim, generator=generator).to(device, case.dtype) for h, dim in shapes]
        self.keys, self.values, self.queries = (x[0].transpose(0, 1) for x in drawn)
        self.base = stored.base
        self.buffers = [self._with_room(buffers, n) for buffers, n in zip(stored.buffers, lengths, strict=True)]

    def _with_room(self, buffers: list[torch.Tensor], length: int) -> list[torch.Tensor]:
        return [torch.cat([x, x.new_full((x.shape[0], length, x.shape[2]), float("nan"))], 1) for x in buffers]

    def tables(self) -> RaggedTables:
        case, stored, size = self.case, self.stored, PAGE_SIZE
        found = stored.tables()
        tokens, copies, tiles, buffers = [], [[0] * 5], [[0] * 5], []
        key_places, value_places = ([-1] * len(table) for table in (found.keys, found.values))
        begin = place = entry = 0
        positions = [0] * len(found.keys)
        for row, length in enumerate(self.lengths):
            first = place
            sinks, key_rest, value_rest, residual = stored.rows[row, 4:8].tolist()
            pages, half = case.pages[row], case.half_quantized_pages[row]
            for page in range(pages + half):
                for side, (places, rest) in enumerate(((key_places, key_rest), (value_places, value_rest))):
                    if page < pages or not rest:
                        places[entry + page] = place + page * size
                    else:
                        copies += self._stretch(row, side, sinks + (page - pages) * size, place + page * size, size)
                positions[entry + page] = int(stored.key_rows[row, 2]) + page * size
            entry, place = entry + pages + half, place + (pages + half) * size
            for side, rest in enumerate((key_rest, value_rest)):
                copies += self._stretch(row, side, 0, place, sinks)
                copies += self._stretch(row, side, sinks + rest, place + sinks, residual - sinks + length)
            place += residual + length
            tokens += [[row, residual + key_rest + i, residual + value_rest + i] for i in range(length)]
            column = place - first - length
            tiles += [
                [begin + i, begin + length, column + i, first, place - first] for i in range(0, length, TILE_QUERIES)
            ]
            begin += length
            width = self.base.element_size()
            line = []
            for buffer in self.buffers[row]:
                line += [(buffer.data_ptr() - self.base.data_ptr()) // width, buffer.stride(0)]
            buffers.append(line)
            place += 5
        tokens += [[0, -1, -1]] * (self.keys.shape[1] - begin)
        capacity = place + 7
        table = torch.zeros(len(positions), 5, dtype=torch.int64)
        placed = torch.tensor(key_places)
        table[:, 0], table[:, 1], table[:, 3] = placed * case.key_dim, capacity * case.key_dim, 128 * (placed >= 0)
        centers = torch.zeros(len(positions), 3, dtype=torch.int64)
        centers[:, 0] = torch.tensor(positions)
        shared = [None, None]
        if found.shared is not None:
            shared = [found.shared[0, :2], found.shared[0, 2:]]
        on_device = [torch.tensor(part).to(self.device) for part in (buffers, tokens, key_places, value_places)]
        f = stored.format
        return RaggedTables(
            self.base, *on_device[:2],
            PageAddresses(f.keys, found.key_base, found.keys, shared[0], found.boosted),
            PageAddresses(f.values, found.value_base, found.values, shared[1]),
            *on_device[2:], table.to(self.device), centers.to(self.device),
            *(torch.tensor(part).to(self.device) for part in (copies, sorted(tiles, key=lambda tile: tile[4]))),
            capacity,
        )  # fmt: skip

    def _stretch(self, row: int, side: int, first: int, place: int, count: int) -> list[list[int]]:
        starts = range(0, count, COPIED_TOKENS)
        return [[row, side, first + i, place + i, min(COPIED_TOKENS, count - i)] for i in starts]

    def sequences(self, rotations: Rotations) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each sequence has stored in the end, new tokens last."""
        new = [
            hadamard_transform(x.float().cpu()).to(x.dtype) if rotated else x.cpu()
            for x, rotated in zip((self.keys, self.values), rotations, strict=True)
        ]
        parts = zip(*(x[:, : sum(self.lengths)].split(list(self.lengths), 1) for x in new), strict=True)
        return [
            tuple(torch.cat([old.to(own.dtype), own], 1) for old, own in zip(stored, part, strict=True))
            for stored, part in zip(self.stored.sequences, parts, strict=True)
        ]


def run(passed: Pass, rotations: Rotations = NO_ROTATION, **extras) -> float:
    """The relative error of a pass's attention."""
    case, tables, f = passed.case, passed.tables(), passed.stored.format
    if f.key_tensors.center is not None:
        f = replace(f, key_tensors=f.key_tensors._replace(center=passed.stored.tables().center))
    assert unsupported(f, case.dtype, passed.device) is None
    queries = append(passed.queries, passed.keys, passed.values, tables, f, rotations)
    output = attend(queries, tables, f, Scoring(case.scaling, **extras))[: sum(passed.lengths)]
    assert output.dtype == case.dtype
    if extras.get("sink_logits") is not None:
        extras["sink_logits"] = extras["sink_logits"].cpu()
    asked = passed.queries.cpu()[:, : sum(passed.lengths)]
    if rotations.keys:
        asked = hadamard_transform(asked.float())
    window, expected = extras.pop("window", None), []
    for own, stored in zip(asked.split(list(passed.lengths), 1), passed.sequences(rotations), strict=True):
        visible = causal_mask(own.shape[1], stored[0].shape[1], window)
        expected.append(attention_reference(own, *stored, visible, case.scaling, **extras).output.transpose(0, 1))
    expected = torch.cat(expected)
    return float((output.cpu().double() - expected).norm() / expected.norm())


CASES = [
    (Case(key_group=32, value_group=32, norm="joint", dtype=BRAIN), (1, 70, 9)),
    (Case(key_dim=64, value_dim=64, value_group=64, boosted=8, dtype=HALF), (65, 1, 2)),
    (Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, half_quantized=1, half_quantized_pages=(2, 0, 0)),
     (40, 3, 1)),
    (Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, half_quantized=2, half_quantized_pages=(1, 0, 0),
          sink_tokens=0), (40, 3, 1)),
    (Case(key_dim=48, value_dim=48, value_group=48, key_bits=16, value_bits=1, dtype=HALF, residual=(0, 0, 0)),
     (20, 70, 1)),
    (Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, center=3.0, position=5000), (20, 7, 1)),
]  # fmt: skip
# Sizes and sources of scales other than those above.
MORE_CASES = [
    (Case(key_dim=96, value_dim=48, value_group=48, dtype=HALF, group=1, heads=3), (17, 64, 3)),
    (Case(key_dim=64, value_dim=64, static=True, key_bits=4, value_bits=8, dtype=HALF, group=2), (33, 5, 128)),
    (Case(key_dim=256, value_dim=256, value_group=64, dtype=HALF, group=2, pages=(0, 1, 0)), (9, 64, 65)),
    (Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, pages=(0, 0), residual=(0, 0),
          half_quantized_pages=(0, 0)), (63, 130)),
]  # fmt: skip
CASES += [pytest.param(*case, marks=FULL) for case in MORE_CASES]


@pytest.mark.parametrize(("case", "lengths"), CASES, ids=str)
def test_new_tokens_of_several_sequences_over_all_that_each_has_stored(device, case, lengths):
    assert run(Pass(case, lengths, device)) < TOLERANCE[case.dtype]


@pytest.mark.quick("softcap")
@pytest.mark.parametrize(
    "extras",
    [
        {"window": 30, "sink_logits": True},
        pytest.param({"softcap": 3.0}, marks=FULL),
        {"window": 290, "softcap": 4.0, "sink_logits": True},
        pytest.param({"window": 4000}, marks=FULL),
        pytest.param({"window": 1}, marks=FULL),
    ],
    ids=str,
)
def test_caps_sink_logits_and_windows(device, extras):
    case = Case(key_dim=64, value_dim=64, value_group=64, dtype=HALF, group=2, sink_tokens=0)
    extras = extras | ({"sink_logits": torch.linspace(-2, 4, 4).to(device)} if "sink_logits" in extras else {})
    assert run(Pass(case, (60, 1, 100), device), **extras) < TOLERANCE[HALF]


@pytest.mark.quick("(True, True)", "(True, False)")
@pytest.mark.parametrize("rotations", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("dim", [32, pytest.param(96, marks=FULL)])
def test_new_tokens_are_rotated_on_the_way(device, rotations, dim):
    case = Case(key_dim=dim, value_dim=dim, value_group=32, dtype=HALF, group=2, pages=(1, 0, 1))
    assert run(Pass(case, (17, 1, 3), device), Rotations(*rotations)) < 2 * TOLERANCE[HALF]


def test_a_sequence_of_which_a_number_is_none_leaves_the_others_alone(device):
    case = Case(key_dim=32, value_dim=32, value_group=32, dtype=HALF, group=1, pages=(1, 0, 1))
    passed = Pass(case, (33, 20, 17), device)
    tables, f = passed.tables(), passed.stored.format
    passed.keys[:, 40], passed.values[:, 41] = float("nan"), float("inf")
    queries = append(passed.queries, passed.keys, passed.values, tables, f, NO_ROTATION)
    output = attend(queries, tables, f, Scoring(case.scaling))
    assert output[:33].isfinite().all()
    assert output[53:70].isfinite().all()
    assert output[41:53].isnan().any()
