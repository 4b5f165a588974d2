"""How the fused 4-bit product runs for many rows: rows and outputs per program, and splits of the inputs."""

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
# Microseconds in which all programs that run at a time get 128 inputs further, and for each number of a split's partial
# sums, from the times of benchmarks/linear_shapes.py on an H100.
STEP_INPUTS = 128
STEP_TIME = {SHORT: 1.6, MIDDLE: 1.6, LONG: 1.85}
PARTIAL_TIME = 4e-6
# Shorter splits do not pay for filling the pipeline and for the second launch.
LEAST_SPLIT_INPUTS = 512


def prompt_shape(rows: int, device_capability: tuple[int, int]) -> PromptShape:
    """What measured best on an H200 for so many rows without splits: benchmarks/gpu_linear.py; for experts."""
    return LONG if rows > 128 and _takes_long(device_capability) else MIDDLE


def split_shape(
    rows: int,
    tiles: int,
    groups: int,
    group_size: int,
    multiprocessors: int,
    device_capability: tuple[int, int],
) -> PromptShape:
    """The shape and the splits of the inputs that should take least time for so many rows of a weight.

    A weight of few outputs makes too few programs for a GPU: its inputs are then split among as many programs as run at
    a time. Splits are whole groups, all but the last of one length and none empty. Of two shapes the one is taken whose
    waves of programs take less time, partial sums included; these are at most 17 MB on 132 multiprocessors.

    Args:
        rows: of the activations, at least 1.
        tiles: of 32 outputs.
        groups, group_size: of the inputs.
        multiprocessors, device_capability: of the GPU.
    """
    if rows <= MIDDLE.rows:
        shapes = (SHORT,) if rows <= SHORT.rows else (MIDDLE,)
    else:
        shapes = prompt_shapes(device_capability)[1:]
    best, least = MIDDLE, float("inf")
    for shape in shapes:
        programs = -(-tiles // shape.tiles) * -(-rows // shape.rows)
        at_a_time = multiprocessors * programs_at_a_time(shape, device_capability)
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


def prompt_shapes(device_capability: tuple[int, int]) -> tuple[PromptShape, ...]:
    """All shapes that run on a GPU, apart from splits."""
    return (SHORT, MIDDLE, LONG) if _takes_long(device_capability) else (SHORT, MIDDLE)


def programs_at_a_time(shape: PromptShape, device_capability: tuple[int, int]) -> int:
    """How many programs of a shape a multiprocessor is to run at a time: what registers and shared memory hold.

    More of SHORT would fit, but that is no faster. Data-center GPUs have 164 KB of shared memory and more, in which
    three of MIDDLE fit; others have 100 KB, of which MIDDLE takes half.
    """
    if shape.rows == LONG.rows:
        return 1
    return 3 if device_capability == (8, 0) or _takes_long(device_capability) else 2


def _takes_long(device_capability: tuple[int, int]) -> bool:
    """Whether there are registers and shared memory for LONG: on data-center GPUs since Hopper."""
    return (9, 0) <= device_capability < (12, 0)
