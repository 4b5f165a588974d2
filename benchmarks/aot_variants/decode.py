"""The specialisations of the decode kernels that layers of the usual models lead to, for compiling them ahead of time.

Head sizes, dtypes, query heads per KV head and formats of pages make far more combinations than can be compiled. Listed
are the formats of the presets with every head size, dtype and number of rows; every pair of widths and every group with
the head size of 128; and the kernel's other features with the formats that can have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from kvconvert.kernels.decode.reference import LayerFormat
from kvconvert.kernels.decode.triton.combine import combine_kernel
from kvconvert.kernels.decode.triton.kernel import decode_kernel, extremes_kernel
from kvconvert.kernels.decode.triton.launch import (
    FEW_REGISTERS,
    STAGES,
    combine_block,
    combine_warps,
    decode_shape,
    registers_for,
    warps_for,
    why_not_decode,
)
from kvconvert.kernels.decode.triton.shape import PAGE, DecodeShape, query_columns, query_rows
from kvconvert.kernels.pages import KeyFormat, ValueFormat
from kvconvert.kernels.spans import SpanFormat
from kvconvert.kernels.variants import Variant

HEADS = 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Channels of keys and of values.
HEAD_SIZES = ((48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
USUAL_HEAD = (128, 128)
# Query heads per KV head, and queries of one program: decoding, and a prompt that follows stored tokens.
ROWS = ((1, 1), (2, 1), (4, 1), (7, 1), (8, 1), (16, 1), (1, 16), (4, 4))
USUAL_ROWS = (4, 1)
HALF = {"none": 0, "values": 1, "keys": 2}


@dataclass(frozen=True)
class Pages:
    """A format of pages, or of spans where `span`, without the head size.

    Groups count tokens for keys and channels for values, 0 means static scales. `boost` is the share of boosted
    channels; `half`, which side stays longer in full precision; `tau`, whether scores of spans are shifted.
    """

    name: str
    key_bits: int = 2
    value_bits: int = 2
    key_group: int = 32
    value_group: int = 32
    norm: str = "none"
    boost: float = 0.0
    select: str = "dynamic"
    half: str = "none"
    span: bool = False
    tau: bool = False


# What the presets of kvconvert/bundle/scheme.py store.
PRESETS = (
    Pages("kivi"),
    Pages("oscar", norm="joint"),
    Pages("oscar-g128", key_group=128, value_group=128, norm="joint"),
    Pages("kitty", key_group=128, value_group=128, boost=0.125, half="values"),
    Pages("kitty-pro", key_group=128, value_group=128, boost=0.25, half="values"),
    Pages("calibquant-1bit", 1, 1, span=True, tau=True),
    Pages("calibquant-2bit", span=True, tau=True),
    Pages("minikv", key_group=16, value_group=16),
)
# Thread instructions per code of the presets' usual variants, measured plus a tenth.
USUAL_PER_CODE = {
    "kivi": 1.85,
    "oscar": 1.9,
    "oscar-g128": 1.3,
    "kitty": 1.4,
    "kitty-pro": 1.5,
    "calibquant-1bit": 1.1,
    "calibquant-2bit": 1.2,
    "minikv": 2.7,
}
# Of all others, by columns of the queries' operand and by whether pages have several groups; the most measured, at the
# smallest heads, plus a tenth. Work on scores is per query and token, so that more columns do more with a code.
PER_CODE = {8: (3.7, 7.7), 16: (13.5, 16.5), 32: (20.0, 31.0)}
# Where the other side has 16 bits, whose work counts for the codes of this one.
MIXED_PER_CODE = 17.6
BITS = (1, 2, 4, 8, 16)
# Everything else that a recipe can ask for, in formats of their own.
OTHERS = (
    *(Pages("widths", *bits, 128, 128) for bits in product(BITS, BITS)),
    *(Pages("groups", bits, bits, *groups) for bits in (1, 2, 4, 8) for groups in product((16, 32, 64, 128), repeat=2)),
    *(Pages("static", *bits, 0, 0) for bits in product((4, 8), (4, 8))),
    *(Pages("norm", bits, 2, 32, 32, "per_head") for bits in (1, 2, 4, 8)),
    *(
        Pages("boost", bits, 2, group, 128, boost=0.125, select=select)
        for bits, group, select in product((2, 4), (32, 128), ("dynamic", "calibrated"))
    ),
    *(Pages("half", bits, bits, 32, 32, half=half) for bits, half in product((1, 2, 4, 8), ("keys", "values"))),
    *(Pages("span", *bits, span=True) for bits in product((1, 2, 4, 8), repeat=2)),
)


def variants(capability: int) -> Iterator[Variant]:
    """The list of this module for one architecture."""
    for pages in PRESETS:
        for head, dtype, rows in product(HEAD_SIZES, DTYPES, ROWS):
            yield from _decode_variants(capability, pages, head, dtype, rows, softcap=False, masked=rows[1] > 1)
        for head, softcap in product(((64, 64), USUAL_HEAD, (256, 256)), (False, True)):
            yield from _decode_variants(capability, pages, head, "bf16", USUAL_ROWS, softcap=softcap, masked=True)
    for pages, head, dtype in product(OTHERS, ((64, 64), USUAL_HEAD), DTYPES):
        yield from _decode_variants(capability, pages, head, dtype, USUAL_ROWS, softcap=False, masked=False)
    for (_, value_dim), dtype, rows, sink_logits, most in product(
        HEAD_SIZES, DTYPES, ROWS, (False, True), (16, 64, 256)
    ):
        if value_dim == HEAD_SIZES[-2][1] and dtype != "bf16":
            continue
        yield _combine_variant(capability, value_dim, dtype, rows, sink_logits, most)


def _decode_variants(
    capability: int,
    pages: Pages,
    head: tuple[int, int],
    dtype: str,
    rows: tuple[int, int],
    softcap: bool,
    masked: bool,
) -> Iterator[Variant]:
    """The decode kernel's variant and, with tau, that of the launch before it; none where no layer can be so."""
    format = _layer_format(pages, head)
    span = SpanFormat(pages.key_bits, pages.value_bits) if pages.span else None
    if format is None or why_not_decode(format, span, DTYPES[dtype], rows[0] * HEADS) is not None:
        return
    shape = decode_shape(
        format, span, DTYPES[dtype], *rows, half=HALF[pages.half], masked=masked, softcap=softcap, tau=pages.tau
    )
    axes = {
        "format": pages.name,
        "key_bits": pages.key_bits,
        "value_bits": pages.value_bits,
        "key_group": shape.key_groups and PAGE // shape.key_groups,
        "value_group": shape.value_groups and head[1] // shape.value_groups,
        "norm": pages.norm,
        "boost": f"{pages.boost} {pages.select}" if pages.boost else "none",
        "half": pages.half,
        "head_size": head[0],
        "dtype": dtype,
        "rows": f"{rows[0]}x{rows[1]}",
        "masked": masked,
        "softcap": softcap,
    }
    preset, usual = pages in PRESETS, ""
    if preset and (head, dtype, rows, softcap, masked) == (USUAL_HEAD, "bf16", USUAL_ROWS, False, False):
        usual = pages.name
    groups = "" if preset else _details(pages)
    name = f"{pages.name}{groups}-{head[0]}x{head[1]}-{dtype}-{rows[0]}x{rows[1]}"
    name += "-masked" * masked + "-softcap" * softcap
    yield _page_variant("decode", decode_kernel, name, shape, dtype, axes, usual, capability)
    if pages.tau:
        yield _page_variant("extremes", extremes_kernel, name, shape, dtype, axes, usual, capability)


def _details(pages: Pages) -> str:
    """What distinguishes formats of the same name."""
    parts = [f"k{pages.key_bits}g{pages.key_group}", f"v{pages.value_bits}g{pages.value_group}"]
    if pages.boost:
        parts.append(pages.select)
    if pages.half != "none":
        parts.append(f"dense {pages.half}".replace(" ", "-"))
    return "".join(f"-{part}" for part in parts)


def _layer_format(pages: Pages, head: tuple[int, int]) -> LayerFormat | None:
    """The format for a head size; None where groups of values do not fit it."""
    key_dim, value_dim = head
    if pages.span:
        return LayerFormat(KeyFormat(HEADS, key_dim, PAGE, 2, PAGE), ValueFormat(HEADS, value_dim, PAGE, 2, value_dim))
    group = _value_group(pages.value_group, value_dim)
    if group is None:
        return None
    static = pages.key_group == 0
    keys = KeyFormat(
        HEADS,
        key_dim,
        PAGE,
        pages.key_bits,
        pages.key_group or PAGE,
        token_norm=pages.norm,
        boosted=round(pages.boost * key_dim),
        boost_select=pages.select,
        static=static,
    )
    return LayerFormat(keys, ValueFormat(HEADS, value_dim, PAGE, pages.value_bits, group, static=static))


def _value_group(wanted: int, value_dim: int) -> int | None:
    """Channels per value group as a scheme chooses them: what is wanted, or the next smaller number that fits."""
    if wanted == 0 or wanted >= value_dim:
        return value_dim
    return next((size for size in range(wanted, 7, -1) if value_dim % size == 0 and size % 8 == 0), None)


_POINTERS = {
    "out": "*fp32",
    "stats": "*fp32",
    "partial": "*fp32",
    "extremes": "*fp32",
    "sink_logits": "*fp32",
    "key_base": "*i16",
    "value_base": "*i16",
    "key_table": "*i64",
    "value_table": "*i64",
    "rows": "*i64",
    "shared": "*i64",
    "boosted": "*i64",
    "clamped_rows": "*i64",
    "items": "*i32",
    "item_rows": "*i32",
    "slot_rows": "*i32",
    "mask": "*u8",
} | dict.fromkeys(("scaling", "softcap", "tau1", "tau2"), "fp32")


def _signature(function: object, constants: dict[str, object], types: dict[str, str]) -> dict[str, str]:
    return {name: types.get(name, "i32") for name in function.arg_names if name not in constants}


def _page_variant(
    kernel: str,
    function: object,
    name: str,
    shape: DecodeShape,
    dtype: str,
    axes: dict[str, object],
    usual: str,
    capability: int,
) -> Variant:
    constants = {"F": shape, "STAGES": STAGES, "DEPENDENT": capability >= 90}
    constants = {key: value for key, value in constants.items() if key in function.arg_names}
    both = ((shape.key_dim, shape.key_bits), (shape.value_dim, shape.value_bits))
    low = [(size, bits) for size, bits in (both if kernel == "decode" else both[:1]) if bits < 16]
    return Variant(
        f"{kernel}-{name}",
        function,
        _signature(function, constants, _POINTERS | {"queries": f"*{dtype}", "dense": f"*{dtype}"}),
        constants,
        num_warps=warps_for(shape),
        num_stages=STAGES,
        axes={"kernel": kernel} | ({"usual": f"{kernel} {usual}"} if usual else {}) | axes,
        codes=PAGE * sum(size for size, _ in low),
        tensor_cores=True,
        wide_loads=bool(low),
        max_registers=registers_for(shape),
        code_bytes=sum(PAGE * size * bits // 8 for size, bits in low),
        most_per_code=USUAL_PER_CODE[usual] if usual else _most_per_code(shape),
        most_local=0.35 if _is_crowded(shape) else 0.05,
        spills=_why_spills(shape),
    )


def _most_per_code(shape: DecodeShape) -> float:
    if 16 in (shape.key_bits, shape.value_bits):
        return MIXED_PER_CODE
    columns = query_rows(shape) * query_columns(shape)
    return PER_CODE[columns][max(shape.key_groups, shape.value_groups) > 1]


def _is_crowded(shape: DecodeShape) -> bool:
    """Whether more has to be held at a time than registers hold, even in the main loop."""
    columns = query_rows(shape) * query_columns(shape)
    return columns > 8 or shape.split_query or 16 in (shape.key_bits, shape.value_bits)


def _why_spills(shape: DecodeShape) -> str:
    """The reason for which registers of a variant do not suffice; empty where they must."""
    if shape.half:
        return "half pages hold full-precision tokens beside codes; a sequence has few of them"
    if registers_for(shape) == FEW_REGISTERS:
        return "few registers, so that more programs hide each other's latencies"
    if 16 in (shape.key_bits, shape.value_bits):
        return "one side of 16 bits beside codes"
    if query_rows(shape) * query_columns(shape) > 8:
        return "more than eight columns of queries"
    if shape.split_query:
        return "queries of 32 bits"
    if max(shape.key_dim, shape.value_dim) > 128:
        return "heads of more than 128 channels"
    if max(shape.key_groups, shape.value_groups) > 4 or shape.boosted or max(shape.key_bits, shape.value_bits) > 4:
        return "many groups, boosted channels, or codes of 8 bits, whose operands are held at a time"
    return ""


def _combine_variant(
    capability: int, value_dim: int, dtype: str, rows: tuple[int, int], sink_logits: bool, most_slots: int
) -> Variant:
    keys = KeyFormat(HEADS, value_dim, PAGE, 2, PAGE)
    format = LayerFormat(keys, ValueFormat(HEADS, value_dim, PAGE, 2, value_dim))
    shape = decode_shape(format, None, DTYPES[dtype], *rows)
    slots, channels = combine_block(most_slots, value_dim)
    constants = {
        "GROUP": rows[0],
        "QUERIES": rows[1],
        "ROWS": query_rows(shape),
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": channels,
        "BLOCK_SLOTS": slots,
        "SINKS": sink_logits,
        "HEADS": HEADS,
        "DEPENDENT": capability >= 90,
    }
    constants = {key: value for key, value in constants.items() if key in combine_kernel.arg_names}
    return Variant(
        f"combine-{value_dim}-{dtype}-{rows[0]}x{rows[1]}-{slots}{'-sinks' * sink_logits}",
        combine_kernel,
        _signature(combine_kernel, constants, _POINTERS | {"out": f"*{dtype}"}),
        constants,
        num_warps=combine_warps(slots, channels),
        num_stages=STAGES,
        axes={"kernel": "combine", "value_size": value_dim, "dtype": dtype, "rows": f"{rows[0]}x{rows[1]}"}
        | {"sinks": sink_logits, "slots": slots},
    )
