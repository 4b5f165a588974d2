"""Quantization of pages and spans on a GPU: launches of the kernels in quantize_keys.py and quantize_values.py.

Pages are addressed by a table, int64 [N, 4] on the device: the offset of the page's first token from a base tensor, the
stride from head to head, the offset of the record from another base tensor, and the page's number of tokens. Offsets
count elements of their base, may lead to other allocations, and are multiples of 8. So one launch serves one page, the
pages of many sequences with buffers of their own, and a whole prompt.

Numbers that cannot be quantized are found on the way: kernels leave the first such page and head in a flag on the
device, which `raise_if_flagged` reads once per flush.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton

from kvconvert.errors import NumericError, UsageError
from kvconvert.kernels.packing import field_bits
from kvconvert.kernels.pages import (
    ChannelScales,
    KeyFormat,
    KeyPages,
    ValueFormat,
    ValuePages,
    empty_keys,
    empty_values,
)
from kvconvert.kernels.pages.layout import ALIGNMENT, KeyLayout, ValueLayout
from kvconvert.kernels.pages.triton.keys import JOINT, NO_NORM, PER_HEAD, joint_norm_kernel, key_page_kernel
from kvconvert.kernels.pages.triton.values import (
    channel_range_kernel,
    channel_scale_kernel,
    copy_page_kernel,
    value_page_kernel,
)
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.kernels.rotate import hadamard_signs
from kvconvert.kernels.spans import BLOCK, Span, SpanFormat
from kvconvert.kernels.variants import Variant

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LARGEST_HEAD = 256
PAGE_SIZES = (16, 32, 64, 128, 256)
NOT_FLAGGED = 2**31 - 1
# Every operation is rounded by itself, as on a CPU.
UNFUSED = {"enable_fp_fusion": False}
# Tile elements per thread.
PER_THREAD = 64
# Channels of one program of the keys, where it needs no others: a row of 128 bytes.
KEY_ROWS = 64
# Tokens of one program of the values: one warp of 2 bits and 128 channels, so that no warp waits for another.
VALUE_TOKENS = 16
# Tokens of one program of the joint norm.
NORM_TOKENS = 16
# Parts of a span whose ranges are found by one program per head each.
SPAN_PARTS = 64

_NORMS = {"none": NO_NORM, "joint": JOINT, "per_head": PER_HEAD}


def why_not(tokens: torch.Tensor, f: KeyFormat | ValueFormat | SpanFormat) -> str | None:
    """Why these kernels cannot quantize such tokens [..., channels] in this format; None if they can."""
    dim = tokens.shape[-1]
    if tokens.dtype not in DTYPES:
        return f"the page kernels do not take {tokens.dtype}"
    if dim % ALIGNMENT or dim > LARGEST_HEAD:
        return f"the page kernels take head sizes that are multiples of {ALIGNMENT} up to {LARGEST_HEAD}, not {dim}"
    page_size = getattr(f, "page_size", BLOCK)
    if page_size not in PAGE_SIZES:
        return f"the page kernels take pages of {PAGE_SIZES} tokens, not {page_size}"
    if tokens.stride(-1) != 1 or any(s % ALIGNMENT for s in tokens.stride()[:-1]) or tokens.data_ptr() % 16:
        return "the page kernels need channels side by side and tokens at multiples of 16 bytes"
    return None


def new_flag(device: torch.device) -> torch.Tensor:
    """A flag that nothing has raised: int32 [1]."""
    return torch.full((1,), NOT_FLAGGED, dtype=torch.int32, device=device)


def raise_if_flagged(flag: torch.Tensor, heads: int, of_span: bool = False) -> None:
    """Wait for the kernels that were given `flag`, and raise what they found; the flag is lowered again.

    Raises:
        GroupRangeError: NaN, infinity, or a scale or zero_point beyond float16; `index` is (page, head), the page counted
            in its launch, and (head,) of a span.
        NumericError: the norm of a key token is not finite or does not fit float16.
    """
    found = int(flag)
    if found == NOT_FLAGGED:
        return
    flag.fill_(NOT_FLAGGED)
    place, is_group = divmod(found, 2)
    if not is_group:
        raise NumericError("the norm of a key token is not finite or exceeds float16")
    page, head = divmod(place, heads)
    raise GroupRangeError(
        f"{'The span' if of_span else f'Page {page}'} of head {head} cannot be quantized because it holds NaN, "
        "infinity, or a range that fp16 scales and zero_points cannot describe; look for the cause where the numbers arose.",
        (head,) if of_span else (page, head),
    )


def page_table(
    tokens: Sequence[torch.Tensor], base: torch.Tensor, records: Sequence[torch.Tensor], record_base: torch.Tensor
) -> torch.Tensor:
    """The table of pages whose tokens [H, P, channels] and records [size] lie anywhere on the bases' device.

    Raises:
        UsageError: one of them does not lie at a multiple of 16 bytes.
    """
    rows = []
    for page, record in zip(tokens, records, strict=True):
        offset, from_record = page.data_ptr() - base.data_ptr(), record.data_ptr() - record_base.data_ptr()
        if offset % 16 or from_record % 16 or page.stride(0) % ALIGNMENT:
            raise UsageError("A page's tokens or record do not lie at a multiple of 16 bytes; copy them first.")
        rows.append(
            (offset // base.element_size(), page.stride(0), from_record // record_base.element_size(), page.shape[1])
        )
    return torch.tensor(rows, dtype=torch.int64).to(base.device, non_blocking=True)


def _regular_table(tokens: torch.Tensor, record_size: int) -> torch.Tensor:
    """The table of pages [N, H, P, channels] whose records of `record_size` lie one after another."""
    table = torch.empty(tokens.shape[0], 4, dtype=torch.int64)
    index = torch.arange(tokens.shape[0])
    table[:, 0], table[:, 1] = index * tokens.stride(0), tokens.stride(1)
    table[:, 2], table[:, 3] = index * record_size, tokens.shape[2]
    return table.to(tokens.device, non_blocking=True)


def quantize_key_pages(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: KeyFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    channels: torch.Tensor | None = None,
    static: ChannelScales | None = None,
    rotate: bool = False,
) -> None:
    """Write key pages into their records; `quantize_keys` in kernels/pages/__init__.py says what.

    Args:
        base: any tensor of the keys' dtype and device, from whose address the table counts.
        token_stride: elements from one token to the next; a multiple of 8.
        table: int64 [N, 4], see above. Every page is full.
        f: their format.
        records: int16, from whose address the table counts records; of 16-bit pages, the keys' dtype.
        flag: int32 [1], see `raise_if_flagged`.
        channels: int64 [H, boosted], with `boost_select="calibrated"`.
        static: of the layer, where `f.static`.
        rotate: keys are not rotated yet; a Hadamard rotation, rounded to their dtype as a stored key is, goes first.
    """
    pages, tile = table.shape[0], _tile(f.head_dim, f.bits)
    matrix, normaliser = hadamard_signs(f.head_dim, base.dtype, base.device) if rotate else (base, 1.0)
    if f.bits == 16:
        copy_page_kernel[(pages * f.heads,)](
            base, records, table, matrix, token_stride, normaliser, f.heads, f.head_dim, tile, f.page_size,
            rotate, num_warps=_warps(f.page_size * tile), **UNFUSED,
        )  # fmt: skip
        return
    layout = KeyLayout.of(f)
    mean_abs = f.token_norm_measure == "mean_abs"
    if f.token_norm == "joint":
        tokens = min(NORM_TOKENS, f.page_size)
        joint_norm_kernel[(pages * (f.page_size // tokens),)](
            base, records, table, matrix, flag, token_stride, normaliser, f.heads, f.head_dim, tile, f.page_size,
            tokens, layout.joint_norm, mean_abs, rotate, num_warps=_warps(tokens * tile), **UNFUSED,
        )  # fmt: skip
    _launch_keys(base, token_stride, table, f, records, flag, channels, static, rotate, partial=False)


def _launch_keys(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: KeyFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    rotate: bool,
    partial: bool,
) -> None:
    tile = _tile(f.head_dim, f.bits)
    matrix, normaliser = hadamard_signs(f.head_dim, base.dtype, base.device) if rotate else (base, 1.0)
    dynamic = f.boosted > 0 and f.boost_select == "dynamic"
    constants, layout = key_constants(f, tile, rotate, partial), KeyLayout.of(f)
    blocks = triton.cdiv(layout.rows, constants["ROW_TILE"])
    key_page_kernel[(table.shape[0] * f.heads * blocks,)](
        base,
        records,
        records.view(torch.uint8) if dynamic else records,
        table,
        static.scale if f.static else records,
        static.zero_point if f.static else records,
        channels if f.boosted and not dynamic else table,
        matrix,
        flag,
        token_stride,
        normaliser,
        *_shrink(f.clip_ratio),
        **constants,
        num_warps=_key_warps(constants),
        **UNFUSED,
    )


def key_constants(f: KeyFormat, tile: int, rotate: bool, partial: bool) -> dict[str, Any]:
    """Compile-time arguments of `key_page_kernel`."""
    layout = KeyLayout.of(f)
    whole = tile // 2 if f.bits == 1 else tile
    chunk = layout.lanes if f.static else max(f.group_size, layout.lanes)
    return {
        "HEADS": f.heads,
        "HEAD_SIZE": f.head_dim,
        "TILE": tile,
        "ROW_TILE": min(whole, 2 * KEY_ROWS if f.boosted or f.token_norm == "per_head" else KEY_ROWS),
        "PAGE": f.page_size,
        "CHUNK": chunk,
        "BITS": f.bits,
        "GROUP": chunk if f.static else f.group_size,
        "NORM": _NORMS[f.token_norm].value,
        "MEAN_ABS": f.token_norm_measure == "mean_abs",
        "BOOSTED": f.boosted,
        "SLOTS": max(16, triton.next_power_of_2(f.boosted)),
        "DYNAMIC": f.boost_select == "dynamic",
        "STATIC": f.static,
        "ROTATE": rotate,
        "PARTIAL": partial,
        "HEAD_STRIDE": layout.head_stride,
        "LANES": layout.lanes,
        "HIGH": layout.high,
        "SCALE": layout.scale,
        "MINIMUM": layout.zero_point,
        "PER_HEAD_NORM": layout.norm,
        "CHANNELS": layout.channels,
        "JOINT_NORM": layout.joint_norm,
    }


def quantize_value_pages(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: ValueFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    static: ChannelScales | None = None,
) -> None:
    """Write value pages into their records; arguments as for `quantize_key_pages`."""
    pages = table.shape[0]
    if f.bits == 16:
        tile = _tile(f.head_dim, f.bits)
        copy_page_kernel[(pages * f.heads,)](
            base, records, table, base, token_stride, 1.0, f.heads, f.head_dim, tile, f.page_size, False,
            num_warps=_warps(f.page_size * tile), **UNFUSED,
        )  # fmt: skip
        return
    _launch_values(base, token_stride, table, f, records, flag, static, partial=False)


def _launch_values(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: ValueFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    static: ChannelScales | None,
    partial: bool,
) -> None:
    constants = value_constants(f, partial)
    blocks = ValueLayout.of(f).rows // constants["TOKENS"]
    value_page_kernel[(table.shape[0] * f.heads * blocks,)](
        base,
        records,
        table,
        static.scale if f.static else records,
        static.zero_point if f.static else records,
        flag,
        token_stride,
        *_shrink(f.clip_ratio),
        **constants,
        num_warps=_value_warps(constants),
        **UNFUSED,
    )


def value_constants(f: ValueFormat, partial: bool) -> dict[str, Any]:
    """Compile-time arguments of `value_page_kernel`."""
    layout = ValueLayout.of(f)
    return {
        "HEADS": f.heads,
        "HEAD_SIZE": f.head_dim,
        "PAGE": f.page_size,
        "TOKENS": min(VALUE_TOKENS, layout.rows),
        "BITS": f.bits,
        "GROUP": f.group_size,
        "STATIC": f.static,
        "PARTIAL": partial,
        "HEAD_STRIDE": layout.head_stride,
        "LANES": layout.lanes,
        "LANE_TILE": triton.next_power_of_2(layout.lanes),
        "SCALE": layout.scale,
        "MINIMUM": layout.zero_point,
    }


def quantize_keys(
    keys: torch.Tensor,
    f: KeyFormat,
    channels: torch.Tensor | None = None,
    static: ChannelScales | None = None,
    rotate: bool = False,
) -> KeyPages:
    """`quantize_keys` of kernels/pages/__init__.py, on keys [N, H, P, D] of any strides that `why_not` accepts."""
    pages = empty_keys(len(keys), f, keys.dtype, keys.device)
    flag = new_flag(keys.device)
    table = _regular_table(keys, pages.buffer.stride(0))
    quantize_key_pages(keys, keys.stride(2), table, f, pages.buffer, flag, channels, static, rotate)
    raise_if_flagged(flag, f.heads)
    return pages


def quantize_values(values: torch.Tensor, f: ValueFormat, static: ChannelScales | None = None) -> ValuePages:
    """`quantize_values` of kernels/pages/__init__.py, on values [N, H, P, E] of any strides that `why_not` accepts."""
    pages = empty_values(len(values), f, values.dtype, values.device)
    flag = new_flag(values.device)
    table = _regular_table(values, pages.buffer.stride(0))
    quantize_value_pages(values, values.stride(2), table, f, pages.buffer, flag, static)
    raise_if_flagged(flag, f.heads)
    return pages


def quantize_span(keys: torch.Tensor, values: torch.Tensor, f: SpanFormat) -> Span:
    """`quantize_span` of kernels/spans/__init__.py: keys [H, n, D], values [H, n, E] of any strides that `why_not` accepts.

    Raises:
        GroupRangeError: NaN, infinity, or a scale or zero_point beyond float16; `index` is (head,).
    """
    heads, tokens = keys.shape[:2]
    blocks = -(-tokens // BLOCK)
    flag = new_flag(keys.device)
    parts = []
    for x, bits, factor in ((keys, f.key_bits, f.key_clip_ratio), (values, f.value_bits, f.value_clip_ratio)):
        scales = _channel_scales(x, bits, factor, flag)
        codes = _span_codes(x, bits, blocks, scales, flag, x is keys)
        parts += [codes, *scales]
    raise_if_flagged(flag, heads, of_span=True)
    return Span(tokens, *parts)


def _channel_scales(x: torch.Tensor, bits: int, factor: float, flag: torch.Tensor) -> ChannelScales:
    heads, tokens, dim = x.shape
    tile = _tile(dim, bits)
    part_tokens = -(-tokens // SPAN_PARTS // BLOCK) * BLOCK or BLOCK
    parts = -(-tokens // part_tokens)
    extremes = torch.empty(2, parts, heads, dim, dtype=torch.float32, device=x.device)
    scales = ChannelScales(*(torch.empty(heads, dim, dtype=torch.float16, device=x.device) for _ in range(2)))
    channel_range_kernel[(parts * heads,)](
        x, extremes, flag, x.stride(0), x.stride(1), tokens, part_tokens, heads, dim, tile, 32,
        num_warps=_warps(32 * tile), **UNFUSED,
    )  # fmt: skip
    channel_scale_kernel[(heads,)](
        extremes, *scales, flag, parts, *_shrink(factor), bits, heads, dim, tile, SPAN_PARTS, num_warps=4, **UNFUSED
    )
    return scales


def _span_codes(
    x: torch.Tensor, bits: int, blocks: int, scales: ChannelScales, flag: torch.Tensor, is_key: bool
) -> torch.Tensor:
    """Codes of a span in blocks, which are static pages of their own scales; the last may be partly filled."""
    heads, tokens, dim = x.shape
    first = torch.arange(0, blocks * BLOCK, BLOCK)
    table = torch.empty(blocks, 4, dtype=torch.int64)
    table[:, 0], table[:, 1], table[:, 3] = first * x.stride(1), x.stride(0), (tokens - first).clamp(max=BLOCK)
    f = KeyFormat(heads, dim, BLOCK, bits, BLOCK, static=True) if is_key else None
    g = None if is_key else ValueFormat(heads, dim, BLOCK, bits, dim, static=True)
    layout = KeyLayout.of(f) if is_key else ValueLayout.of(g)
    table[:, 2] = torch.arange(blocks) * layout.record
    table = table.to(x.device, non_blocking=True)
    codes = torch.empty(blocks, heads, layout.lanes, layout.rows, dtype=torch.int16, device=x.device)
    if is_key:
        _launch_keys(x, x.stride(1), table, f, codes, flag, None, scales, rotate=False, partial=True)
    else:
        _launch_values(x, x.stride(1), table, g, codes, flag, scales, partial=True)
    return codes


def _shrink(factor: float) -> tuple[float, float]:
    """What the extent of a range is multiplied with, and its part by which the zero_point rises."""
    return factor, (1 - factor) / 2


def _tile(dim: int, bits: int) -> int:
    """Channels of a tile: a power of two, of which matrix instructions want 16, at 1 bit in each half."""
    return max(32 if bits == 1 else 16, triton.next_power_of_2(dim))


def _warps(elements: int) -> int:
    return min(32, max(1, elements // (32 * PER_THREAD)))


def _key_warps(constants: dict[str, Any]) -> int:
    elements = constants["CHUNK"] * constants["ROW_TILE"]
    # Where chunks follow one another, wider or paired codes take more registers for every element.
    if constants["CHUNK"] < constants["PAGE"]:
        return _warps(elements * (2 if constants["STATIC"] else {1: 4, 2: 1, 4: 2, 8: 4}[constants["BITS"]]))
    if constants["BOOSTED"]:
        # Ranking exchanges scores between all warps: the fewer the better, but for pairs, which take more registers.
        return _warps(elements * 2 if constants["BITS"] == 1 else elements // 2)
    return _warps(elements)


def _value_warps(constants: dict[str, Any]) -> int:
    planes = 16 // field_bits(constants["BITS"])
    elements = planes * constants["TOKENS"] * constants["LANE_TILE"]
    # Groups one by one, or two fields' halves, take more registers for every element.
    crowded = constants["LANES"] != constants["LANE_TILE"] or constants["BITS"] == 1
    return _warps(elements * (2 if crowded else 1))


def variants(capability: int) -> Iterator[Variant]:
    """Specialisations that the dispatch chooses for the usual models: 8 KV heads, pages of 128 tokens."""
    for dtype, dim in (*product(("bf16",), (64, 80, 128, 256)), ("fp16", 128), ("fp32", 128)):
        for bits, group in product((1, 2, 4, 8), (16, 32, 128)):
            yield _key_variant(dtype, KeyFormat(8, dim, 128, bits, group))
        for bits, group in product((1, 2, 4, 8), sorted({g for g in (16, 32, 128) if dim % g == 0} | {dim})):
            yield _value_variant(dtype, ValueFormat(8, dim, 128, bits, group))
        for group, norm in product((32, 128), ("joint", "per_head")):
            yield _key_variant(dtype, KeyFormat(8, dim, 128, 2, group, token_norm=norm))
        for bits, boosted, select in product((1, 2), (dim // 8, dim // 4), ("dynamic", "calibrated")):
            yield _key_variant(dtype, KeyFormat(8, dim, 128, bits, 128, boosted=boosted, boost_select=select))
        for bits, partial in product((1, 2, 4, 8), (False, True)):
            yield _key_variant(dtype, KeyFormat(8, dim, 128, bits, 128, static=True), partial)
            yield _value_variant(dtype, ValueFormat(8, dim, 128, bits, dim, static=True), partial)
        tile, name = _tile(dim, 2), f"{dtype}-{dim}"
        shape = {"HEADS": 8, "HEAD_SIZE": dim, "TILE": tile}
        page = {"PAGE": 128, "ROTATE": False}
        for measure in ("l2", "mean_abs"):
            constants = shape | page | {"TOKENS": NORM_TOKENS, "OFFSET": 24576, "MEAN_ABS": measure == "mean_abs"}
            yield _variant(f"norm-{name}-{measure}", joint_norm_kernel, dtype, constants, _warps(NORM_TOKENS * tile))
        yield _variant(f"copy-{name}", copy_page_kernel, dtype, shape | page, _warps(128 * tile))
        yield _variant(f"range-{name}", channel_range_kernel, dtype, shape | {"ROWS": 32}, _warps(32 * tile))
        for bits in (1, 2, 4, 8):
            constants = shape | {"BITS": bits, "PART_TILE": SPAN_PARTS}
            yield _variant(f"scale-{name}-{bits}", channel_scale_kernel, dtype, constants, 4)


def _key_variant(dtype: str, f: KeyFormat, partial: bool = False) -> Variant:
    tile = _tile(f.head_dim, f.bits)
    constants = key_constants(f, tile, False, partial)
    select = f"{f.boost_select}{f.boosted}" if f.boosted else ""
    name = f"keys-{dtype}-{f.head_dim}-{f.bits}-{f.group_size}-{f.token_norm}{select}{'-static' * f.static}"
    variant = _variant(name + "-partial" * partial, key_page_kernel, dtype, constants, _key_warps(constants))
    if dtype == "fp32" and f.boosted and f.boost_select == "dynamic":
        return replace(variant, spills="8 bytes of stack are reserved and never accessed")
    return variant


def _value_variant(dtype: str, f: ValueFormat, partial: bool = False) -> Variant:
    constants = value_constants(f, partial)
    name = f"values-{dtype}-{f.head_dim}-{f.bits}-{f.group_size}{'-static' * f.static}{'-partial' * partial}"
    return _variant(name, value_page_kernel, dtype, constants, _value_warps(constants))


_TOKENS = ("keys", "values", "tokens", "source", "target", "matrix")
_TYPES = {
    "records": "*i16",
    "record_bytes": "*u8",
    "table": "*i64",
    "boosted": "*i64",
    "flag": "*i32",
    "extremes": "*fp32",
    "normaliser": "fp32",
    "factor": "fp32",
    "shrink": "fp32",
} | dict.fromkeys(("static_scales", "static_minima", "scales", "zero_points"), "*fp16")


def _variant(name: str, function: Any, dtype: str, constants: dict[str, Any], num_warps: int) -> Variant:
    types = dict.fromkeys(_TOKENS, f"*{dtype}") | _TYPES
    signature = {argument: types.get(argument, "i32") for argument in function.arg_names if argument not in constants}
    axes = {"kernel": name.partition("-")[0], "dtype": dtype} | {
        key: constants[key] for key in ("HEAD_SIZE", "BITS", "GROUP", "NORM", "BOOSTED", "STATIC") if key in constants
    }
    few = constants.get("BITS") == 1 or function is channel_range_kernel
    return Variant(
        name,
        function,
        signature,
        constants,
        num_warps,
        num_stages=3,
        axes=axes,
        spills="at most six registers, on some architectures" if few else "",
    )
