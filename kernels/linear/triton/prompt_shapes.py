"""How the fused product runs for many rows: rows and outputs per program, and splits of the inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvconvert.kernels.linear.packed_layout import TILE


@dataclass(frozen=True)
class PromptShape:
    """How `prompt` runs: rows and tiles per program, warps, loads in flight (pipeline stages), splits of the inputs."""

    rows: int
    tiles: int
    warps: int
    stages: int
    splits: int = 1


SHORT, MIDDLE, LONG = PromptShape(32, 4, 4, 3), PromptShape(64, 4, 4, 3), PromptShape(128, 8, 8, 3)
# For k blocks of 256 inputs, the first of them where there are neither registers nor shared memory for the others.
WIDE_SMALL, WIDE_MIDDLE, WIDE_LONG = PromptShape(64, 4, 4, 2), PromptShape(64, 8, 8, 3), PromptShape(128, 8, 8, 2)
# Microseconds in which all programs that run at a time get 128 inputs further, and for each number of a split's partial
# sums, from the times of benchmarks/linear_shapes.py on an H100; of k blocks of 256 inputs on an H200.
STEP_INPUTS = 128
STEP_TIME = {SHORT: 1.6, MIDDLE: 1.6, LONG: 1.85, WIDE_SMALL: 1.6, WIDE_MIDDLE: 1.45, WIDE_LONG: 2.4}
PARTIAL_TIME = 4e-6
# Shorter splits do not pay for filling the pipeline and for the second launch.
LEAST_SPLIT_INPUTS = 512


def prompt_shape(rows: int, device_capability: tuple[int, int], k_block: int) -> PromptShape:
    """What measured best on an H200 for this number of rows without splits: benchmarks/gpu_linear.py; for experts."""
    shapes = prompt_shapes(device_capability, k_block)[1:]
    return shapes[-1] if rows > 128 else shapes[0]


def split_shape(
    rows: int,
    tiles: int,
    groups: int,
    group_size: int,
    multiprocessors: int,
    device_capability: tuple[int, int],
    *,
    k_block: int = 128,
    bits: int = 4,
) -> PromptShape:
    """The shape and the splits of the inputs that should take least time for this number of rows.

    A weight of few outputs makes too few programs for a GPU: its inputs are then split among as many programs as run at
    a time. Splits are whole groups, all but the last of one length and none empty. Of two shapes the one is taken whose
    waves of programs take less time, partial sums included; these are at most 17 MB on 132 multiprocessors.

    Args:
        rows: rows of the activations, at least 1.
        tiles: tiles of 32 outputs.
        groups, group_size: the groups of the inputs and the size of one.
        multiprocessors, device_capability: the GPU's.
        k_block, bits: the layout's; groups are no shorter than k blocks.
    """
    short, middle, *longer = prompt_shapes(device_capability, k_block)
    if rows <= middle.rows:
        shapes = (short,) if rows <= short.rows else (middle,)
    else:
        shapes = (middle, *longer)
    best, least = middle, float("inf")
    for shape in shapes:
        programs = -(-tiles // shape.tiles) * -(-rows // shape.rows)
        at_a_time = multiprocessors * programs_at_a_time(shape, device_capability, bits)
        most = min(at_a_time // programs, groups * group_size // LEAST_SPLIT_INPUTS)
        split_groups = -(-groups // max(1, most))
        splits = -(-groups // split_groups)
        waves = -(-programs * splits // at_a_time)
        time = waves * split_groups * group_size / STEP_INPUTS * STEP_TIME[shape]
        if splits > 1:
            time += splits * rows * tiles * TILE * PARTIAL_TIME
        if time < least:
            best, least = replace(shape, splits=splits), time
    return best


def prompt_shapes(device_capability: tuple[int, int], k_block: int) -> tuple[PromptShape, ...]:
    """All shapes that run on a GPU with k blocks of this size, from few rows to many, apart from splits."""
    large = _takes_long(device_capability)
    if k_block > STEP_INPUTS:
        return (SHORT, WIDE_MIDDLE, WIDE_LONG) if large else (SHORT, WIDE_SMALL)
    return (SHORT, MIDDLE, LONG) if large else (SHORT, MIDDLE)


def programs_at_a_time(shape: PromptShape, device_capability: tuple[int, int], bits: int = 4) -> int:
    """How many programs of a shape a multiprocessor is to run at a time: what registers and shared memory hold.

    More of SHORT would fit, but that is no faster. Data-center GPUs have 164 KB of shared memory and more, in which
    three of MIDDLE fit, or two at 8 bits; others have 100 KB, of which MIDDLE takes half.
    """
    if shape.warps == LONG.warps:
        return 1
    if shape.stages == WIDE_SMALL.stages or (shape.rows == MIDDLE.rows and bits == 8):
        return 2
    return 3 if device_capability == (8, 0) or _takes_long(device_capability) else 2


def _takes_long(device_capability: tuple[int, int]) -> bool:
    """Whether there are registers and shared memory for LONG: on data-center GPUs since Hopper."""
    return (9, 0) <= device_capability < (12, 0)
