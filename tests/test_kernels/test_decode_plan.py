"""Work items cover every page, half-quantized page and residual token once, in items of nearly equal cost."""

import numpy as np
import pytest
import torch

from kvconvert.kernels.decode.plan import (
    HALF_QUANTIZED_COST,
    OPEN_END,
    RESIDUAL_TOKENS,
    Segment,
    SequencePlan,
    most_items,
    plan_each,
    plan_rows,
    plan_work,
)


def covered(plan, row):
    """Table entries, half-quantized pages and residual tokens of a sequence's items, in order."""
    entries, half_quantized, residual = [], [], []
    for item in plan.items[plan.item_rows[row] : plan.item_rows[row + 1]].tolist():
        assert item[0] == row
        entries += range(item[1], item[2])
        half_quantized += range(item[3], item[4])
        residual.append((item[5], item[6]))
    return entries, half_quantized, [part for part in residual if part[0] < part[1]]


@pytest.mark.parametrize("programs", [1, 3, 7, 1000])
def test_everything_is_covered_once(programs):
    sequences = [
        SequencePlan((Segment(0, 10, 1280),), 70, half_quantized=2, half_quantized_begin=10),
        SequencePlan((), 0),
        SequencePlan((Segment(12, 15, 300, 1), Segment(15, 16, 100, 2)), 33),
    ]
    plan = plan_work(sequences, programs)
    for row, sequence in enumerate(sequences):
        entries, half_quantized, residual = covered(plan, row)
        assert entries == [entry for part in sequence.segments for entry in range(part.begin, part.end)]
        assert half_quantized == list(range(sequence.half_quantized))
        assert residual[0][0] == 0 or not sequence.residual
        assert [stop for _, stop in residual[:-1]] == [start for start, _ in residual[1:]]
        assert residual[-1][1] == OPEN_END


def test_slots_are_consecutive_and_counted():
    plan = plan_work([SequencePlan((Segment(0, 9, 1152),), 40), SequencePlan((Segment(9, 10, 128),), 5)], 6)
    slots = [s for item in plan.items.tolist() for s in item[7:10] if s >= 0]
    assert slots == list(range(plan.slots))
    assert plan.slot_rows.tolist()[-1] == plan.slots
    assert plan.most_slots == max(plan.slot_rows.diff().tolist())


def test_items_stay_within_the_programs_and_near_each_other():
    sequences = [SequencePlan((Segment(0, 63, 8064),), 128) for _ in range(32)]
    plan = plan_work(sequences, 198)
    assert len(plan.items) <= 198
    units = []
    for _, begin, end, half_quantized_begin, half_quantized_end, start, stop, *_ in plan.items.tolist():
        residual = min(stop, 128) - start
        units.append(
            end
            - begin
            + HALF_QUANTIZED_COST * (half_quantized_end - half_quantized_begin)
            + -(-max(0, residual) // RESIDUAL_TOKENS)
        )
    assert max(units) <= min(units) + 1


@pytest.mark.parametrize("pages", [1, 5, 40, 56, 63, 100])
@pytest.mark.parametrize("half_quantized", [0, 1, 2])
def test_what_cannot_be_divided_takes_no_second_wave(pages, half_quantized):
    sequences = [
        SequencePlan((Segment(0, pages, 128 * pages),), 160, half_quantized=half_quantized, half_quantized_begin=pages)
        for _ in range(32)
    ]
    assert len(plan_work(sequences, 132).items) <= 132


def test_an_item_holds_pages_of_one_segment_only():
    plan = plan_work([SequencePlan((Segment(0, 3, 300, 4), Segment(3, 5, 200, 7)), 0)], 1)
    assert [item[10] for item in plan.items.tolist() if item[1] < item[2]] == [4, 7]
    assert [item[11] for item in plan.items.tolist() if item[1] < item[2]] == [300, 200]


def test_a_page_plan_knows_how_many_tokens_are_left_from_its_first_page():
    plan = plan_work([SequencePlan((Segment(0, 4, 450, first_token=9),), 0)], 2)
    first, second = [item for item in plan.items.tolist() if item[1] < item[2]]
    assert (first[11], second[11]) == (450, 450 - 128 * (second[1] - first[1]))
    assert second[12] == 9 + 128 * (second[1] - first[1])


@pytest.mark.parametrize("programs", [1, 7, 60, 198])
@pytest.mark.parametrize("sequences", [1, 3, 4, 5, 50, 300])
@pytest.mark.parametrize("half_quantized", [0, 2])
def test_no_more_items_than_are_announced(programs, sequences, half_quantized):
    lengths = [(7 * number) % 90 for number in range(sequences)]
    plan = plan_work(
        [
            SequencePlan(
                (Segment(0, pages, 128 * pages),) if pages else (), 388, half_quantized, half_quantized_begin=pages
            )
            for pages in lengths
        ],
        programs,
    )
    assert len(plan.items) <= most_items(sequences, programs)


@pytest.mark.parametrize("programs", [1, 7, 198])
def test_rows_of_whole_pages_are_divided_as_one_by_one(programs):
    dice = np.random.default_rng(0)
    for count in (1, 3, 40, 200):
        pages, exists = dice.integers(0, 60, count) * dice.integers(0, 2, count), dice.integers(0, 4, count) > 0
        pages, residual = pages * exists, exists * 132
        starts = np.cumsum(pages) - pages
        together = plan_rows(starts, pages, residual, 4, programs)
        sequences = [
            SequencePlan((Segment(first, first + n, 128 * n, hidden=4),) if n else (), rest, 0, first, 0, 128 * n)
            for first, n, rest in zip(starts.tolist(), pages.tolist(), residual.tolist(), strict=True)
        ]
        alone = plan_each(sequences, programs)
        for found in (together, plan_work(sequences, programs)):
            for name in ("items", "item_rows", "slot_rows"):
                torch.testing.assert_close(getattr(found, name), getattr(alone, name), rtol=0, atol=0)
            assert (found.slots, found.most_slots) == (alone.slots, alone.most_slots)


def test_what_is_no_row_of_whole_pages_is_divided_one_by_one():
    whole = SequencePlan((Segment(0, 3, 384, hidden=4),), 132, 0, 3, 384, 384)
    for other in (
        SequencePlan((Segment(3, 5, 200, 7),), 132, 0, 5, 200, 200),
        SequencePlan((Segment(3, 5, 256, hidden=2),), 132, 0, 5, 256, 256),
        SequencePlan((Segment(3, 5, 256, hidden=4),), 132, 1, 5, 256, 384),
        SequencePlan((Segment(3, 5, 256), Segment(5, 6, 128, 1, 256)), 132, 0, 6, 384, 384),
    ):
        found, expected = (plan([whole, other], 7) for plan in (plan_work, plan_each))
        assert torch.equal(found.items, expected.items)
        assert (found.slots, found.most_slots) == (expected.slots, expected.most_slots)
