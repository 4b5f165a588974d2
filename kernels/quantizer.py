"""The affine group quantizer of the key-value cache: the formula every other implementation is measured against.

    scale = (max - min) / (2^b - 1)      q = clamp(round((x - min) / scale), 0, 2^b - 1)      x_hat = q scale + min

The asymmetric min/max quantizer of KIVI (arXiv 2402.02750) and OScaR, with scale and offset stored in fp16 and the
codes computed from those STORED values, so that writer and reader agree on what a code means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.errors import NumericError, UsageError
from kvconvert.kernels.code_bits import CODE_BITS

# A flag that no kernel has raised: kernels report numbers that cannot be quantized on the device, once per flush.
NOT_FLAGGED = 2**31 - 1
_HALF_MAX = torch.finfo(torch.float16).max
# Of scales of 8 bits: parts of the scale that an offset counts, and the least scale for an offset of 1, with
# which 127 of them reach it even where the scale was rounded down by a sixteenth.
OFFSET_PARTS = 4
LEAST_SCALE = 9 / 256
# Bits of a scale in a unit of `pack_grid`, and the offset that the others spell as float16 with a scale of 1.
SCALE_MASK = 0x7F80
OFFSET_UNIT = 2.0**24 / OFFSET_PARTS


class GroupRangeError(NumericError):
    """A group that no fp16 scale and offset can describe.

    Attributes:
        index: position of the first such group in the tensor of scales: the quantized tensor's own index, with the
            quantized axis counting groups. The caller, who knows what the axes are, names layer and head.
    """

    def __init__(self, message: str, index: tuple[int, ...]) -> None:
        super().__init__(message)
        self.index = index


class Quantized(NamedTuple):
    """Codes with the scale and offset of each group; see `quantize` for shapes."""

    codes: Tensor
    scale: Tensor
    offset: Tensor


def quantize(
    x: Tensor, bits: int, group_size: int, dim: int, clip_ratio: float | Tensor = 1.0, scale_bits: int = 16
) -> Quantized:
    """Quantize groups of `group_size` consecutive entries along `dim`, in float32.

    A constant group gets scale 0 and code 0: its values come back as their own fp16 rounding. So does a group so narrow
    that its scale underflows fp16 (below 3e-8), which then comes back as its offset.

    Args:
        x: any float tensor; `x.shape[dim]` is a multiple of `group_size`.
        bits: width of a code: 1, 2, 3, 4 or 8.
        group_size: entries that share one scale and offset.
        dim: the quantized axis.
        clip_ratio: above 0 and at most 1; shrinks each group's (min, max) about its midpoint by this factor, values
            outside being clamped. A tensor [x.shape[0]], float64, has one for each entry of the first axis, unchecked.
        scale_bits: width of a scale and of an offset: 16, or 8, see `eight_bit_grid`.

    Returns:
        codes uint8 in the shape of `x`; scale and offset fp16 in that shape with `dim` counting groups.

    Raises:
        GroupRangeError: a group holds NaN or infinity, or its offset or scale is beyond fp16.
        UsageError: arguments that do not fit together.
    """
    if bits not in CODE_BITS:
        raise UsageError(f"A code of {bits} bits cannot be stored; choose one of {CODE_BITS}.")
    if isinstance(clip_ratio, Tensor):
        clip_ratio = clip_ratio.view(-1, *[1] * x.ndim)
    elif not 0 < clip_ratio <= 1:
        raise UsageError(f"clip_ratio = {clip_ratio} cannot shrink a range; choose a factor above 0 and at most 1.")
    dim = dim % x.ndim
    groups = _split(x, group_size, dim).to(torch.float32)
    # Two reductions: torch.aminmax is about ten times slower than both together on a CPU.
    low, high = groups.amin(dim + 1, keepdim=True), groups.amax(dim + 1, keepdim=True)
    scale, offset = affine_grid(low, high, bits, clip_ratio, scale_bits)
    if not (scale.isfinite() & offset.isfinite()).all():
        _raise_range_error(scale.squeeze(dim + 1), offset.squeeze(dim + 1), groups, dim)
    codes = _nearest_codes(groups, bits, scale, offset)
    return Quantized(codes.flatten(dim, dim + 1), scale.squeeze(dim + 1), offset.squeeze(dim + 1))


def affine_grid(
    low: Tensor, high: Tensor, bits: int, clip_ratio: float | Tensor = 1.0, scale_bits: int = 16
) -> tuple[Tensor, Tensor]:
    """Scale and offset, fp16, of groups that span `low` to `high` (float32), shrunk by `clip_ratio`.

    What fp16 cannot describe comes back as infinity or NaN, which the caller, who knows the groups, has to refuse.
    """
    extent = high - low
    if isinstance(clip_ratio, Tensor):
        low = low + extent * ((1 - clip_ratio) / 2).float()
        extent = extent * clip_ratio.float()
    elif clip_ratio < 1:
        low = low + extent * ((1 - clip_ratio) / 2)
        extent = extent * clip_ratio
    scale, offset = (extent / (2**bits - 1)).half(), low.half()
    return (scale, offset) if scale_bits == 16 else eight_bit_grid(scale, offset)


def eight_bit_grid(scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest scale and offset that `pack_grid` can store, float16 again.

    A scale has the exponent of float16 and three bits of its mantissa. A offset is a whole number of quarters of
    its scale, at most 127 in size, and exactly a float16 number. Where it lies further from 0, the scale grows until it
    does not.
    """
    least = offset.float().abs() * LEAST_SCALE
    bits = torch.maximum(scale.float(), least).half().view(torch.int16).int() & 0x7FFF
    # What is not finite stays so.
    scale = ((bits.clamp(max=0x7C00) + 64 >> 7) << 7).to(torch.int16).view(torch.float16)
    step = scale.float() / OFFSET_PARTS
    codes = (offset.float() / step.masked_fill(step == 0, torch.inf)).round_().clamp_(-127, 127)
    return scale, (codes * step).half()


def pack_grid(scale: Tensor, offset: Tensor) -> Tensor:
    """Scale and offset of `eight_bit_grid` as int16.

    Bits 7 to 14 are those of the float16 scale, whose others are zeros. Bits 0 to 6 hold the number of quarters of the
    scale that make the offset, bit 15 its sign: one AND gives the scale, another the number times 2^-24.
    """
    step = scale.float().masked_fill(scale == 0, torch.inf) / OFFSET_PARTS
    count = (offset.float() / step).round_().to(torch.int16)
    return scale.view(torch.int16) | count.abs() | torch.where(count < 0, -(2**15), 0).to(torch.int16)


def unpack_grid(units: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset, float16, from `pack_grid`."""
    scale = (units & SCALE_MASK).view(torch.float16)
    count = (units & ~SCALE_MASK).view(torch.float16).float()
    return scale, (count * (scale.float() * OFFSET_UNIT)).half()


def quantize_static(x: Tensor, bits: int, scale: Tensor, offset: Tensor) -> Tensor:
    """Codes of values by a scale and offset that are known beforehand; values outside their range are clamped.

    Args:
        x: any float tensor.
        bits: width of a code: 1, 2, 3, 4 or 8.
        scale, offset: fp16, finite, broadcast against `x`. Where the scale is 0 the code is 0.

    Returns:
        uint8 in the shape of `x`.

    Raises:
        GroupRangeError: `x` holds NaN or infinity; its `index` is that of the first such number.
        UsageError: no such width.
    """
    if bits not in CODE_BITS:
        raise UsageError(f"A code of {bits} bits cannot be stored; choose one of {CODE_BITS}.")
    if not x.isfinite().all():
        index = tuple(int(i) for i in (~x.isfinite()).nonzero()[0])
        raise GroupRangeError(f"the number at {index} is NaN or infinity; look for the cause where it arose.", index)
    return _nearest_codes(x.float(), bits, scale, offset)


def _nearest_codes(x: Tensor, bits: int, scale: Tensor, offset: Tensor) -> Tensor:
    step = scale.float()
    # Dividing by infinity makes every code of a zero scale 0, whatever the rounding of its offset left over.
    step = step.masked_fill(step == 0, torch.inf)
    values = (x - offset.float()).div_(step).round_().clamp_(0, 2**bits - 1)
    # By way of int16, because torch vectorises that conversion and not the one to uint8: four times faster on a CPU.
    return values.to(torch.int16).to(torch.uint8)


def dequantize(
    codes: Tensor, scale: Tensor, offset: Tensor, group_size: int, dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values that codes stand for: `codes scale + offset` in float32, rounded once to `dtype`.

    Args:
        codes: uint8.
        scale, offset: fp16, the shape of `codes` with `dim` counting groups.
        group_size, dim: as given to `quantize`.
        dtype: the result's; float16 saturates at its largest value instead of turning into infinity.
    """
    dim = dim % codes.ndim
    groups = _split(codes, group_size, dim).to(torch.float32)
    values = groups.mul_(scale.float().unsqueeze(dim + 1)).add_(offset.float().unsqueeze(dim + 1))
    if dtype == torch.float16:
        # The fp16 rounding of a scale may lift the topmost code just over the largest fp16 number.
        values = values.clamp_(-_HALF_MAX, _HALF_MAX)
    return values.flatten(dim, dim + 1).to(dtype)


def _split(x: Tensor, group_size: int, dim: int) -> Tensor:
    if group_size < 1 or x.shape[dim] % group_size:
        raise UsageError(
            f"A group size of {group_size} does not divide axis {dim} of a tensor of shape {tuple(x.shape)}."
        )
    return x.unflatten(dim, (x.shape[dim] // group_size, group_size))


def _raise_range_error(scale: Tensor, offset: Tensor, groups: Tensor, dim: int) -> None:
    index = tuple(int(i) for i in (~(scale.isfinite() & offset.isfinite())).nonzero()[0])
    members = groups.select(dim, index[dim])[(*index[:dim], slice(None), *index[dim + 1 :])]
    if not members.isfinite().all():
        raise GroupRangeError(
            f"Group {index} cannot be quantized because it holds NaN or infinity; look for the cause where it arose.",
            index,
        )
    low, high = float(members.min()), float(members.max())
    raise GroupRangeError(
        f"Group {index} cannot be quantized because it spans {low:.4g} to {high:.4g}, more than fp16 scales and "
        f"offsets can describe; keep this tensor unquantized.",
        index,
    )


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor of floating-point numbers holds neither NaN nor infinity; one without numbers does not.

    From its smallest and largest number, both of which are NaN where one is: on a CPU 5 times as fast as `isfinite` for
    float32 and 40 times for bfloat16, and without a tensor of booleans.
    """
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite() & high.isfinite())


def new_flag(device: torch.device) -> torch.Tensor:
    """A flag that nothing has raised: int32 [1]."""
    return torch.full((1,), NOT_FLAGGED, dtype=torch.int32, device=device)


def raise_if_flagged(flag: torch.Tensor | int, heads: int, of_span: bool = False) -> None:
    """Wait for the kernels that were given `flag`, and raise what they found; the flag is lowered again.

    The number that was read from a flag may take its place; whoever read it gives up the flag itself.

    Raises:
        GroupRangeError: NaN, infinity, or a scale or offset beyond float16; `index` is (page, head), the page
            counted in its launch, and (head,) of a span.
        NumericError: the norm of a key token is not finite or does not fit float16.
    """
    found = int(flag)
    if found == NOT_FLAGGED:
        return
    if isinstance(flag, torch.Tensor):
        flag.fill_(NOT_FLAGGED)
    place, is_group = divmod(found, 2)
    if not is_group:
        raise NumericError("the norm of a key token is not finite or exceeds float16")
    page, head = divmod(place, heads)
    raise GroupRangeError(
        f"{'The span' if of_span else f'Page {page}'} of head {head} cannot be quantized because it holds NaN, "
        "infinity, or a range that fp16 scales and offsets cannot describe; look for the cause where the numbers "
        "arose.",
        (head,) if of_span else (page, head),
    )
