"""The rule for shapes and splits of the fused product is legal on every GPU."""

from itertools import product

import pytest

from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.many_rows import (
    LEAST_SPLIT_INPUTS,
    LONG,
    PromptShape,
    programs_at_a_time,
    prompt_shapes,
    split_shape,
)

# Multiprocessors and capability: A100, A10, RTX 4090, H100, B200, RTX 5090, and what stands in for a GPU in tests.
GPUS = [(108, (8, 0)), (72, (8, 6)), (128, (8, 9)), (132, (9, 0)), (148, (10, 0)), (170, (12, 0)), (4, (9, 0))]
# Bytes of partial sums on 132 multiprocessors.
MOST_PARTIALS = 20 << 20


@pytest.mark.parametrize(("multiprocessors", "device_capability"), GPUS)
def test_the_rule_is_legal_for_odd_weights(multiprocessors: int, device_capability: tuple[int, int]) -> None:
    inputs = [(1, 32), (5, 32), (129, 32), (37, 64), (1, 128), (3, 128), (32, 128), (112, 128), (7, 256), (1, 4096)]
    layouts = [(128, 4), (128, 8), (256, 2)]
    every = product([1, 17, 32, 33, 65, 300, 5000], [1, 3, 128, 4008], inputs, layouts)
    for rows, tiles, (groups, group_size), (k_block, bits) in every:
        shape = split_shape(
            rows, tiles, groups, group_size, multiprocessors, device_capability, k_block=k_block, bits=bits
        )
        one = PromptShape(shape.rows, shape.tiles, shape.warps, shape.stages)
        assert one in prompt_shapes(device_capability, k_block)
        assert 1 <= shape.splits <= groups
        # No split is empty: whole groups, the same number in all but the last.
        split_groups = -(-groups // shape.splits)
        assert split_groups * (shape.splits - 1) < groups
        if shape.splits > 1:
            assert split_groups * group_size >= LEAST_SPLIT_INPUTS
            programs = -(-rows // shape.rows) * -(-tiles // shape.tiles) * shape.splits
            assert programs <= multiprocessors * programs_at_a_time(shape, device_capability, bits)
            assert shape.splits * rows * tiles * TILE * 4 <= MOST_PARTIALS * multiprocessors / 132


def test_the_large_shape_runs_where_there_is_shared_memory_for_it() -> None:
    for multiprocessors, device_capability in GPUS:
        shape = split_shape(256, 896, 32, 128, multiprocessors, device_capability)
        assert (shape.rows == LONG.rows) == ((9, 0) <= device_capability < (12, 0))
