"""The specialisations of the decode kernels that layers of the usual models lead to, for compiling them ahead of time.

Head sizes, dtypes, query heads per KV head and formats of pages make far more combinations than can be compiled. Listed
are the formats of the presets with every head size, dtype and number of rows; every pair of widths and every group with
the head size of 128; and the kernel's other features with the formats that can have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from aot_variants.variant import Variant
from kvconvert.cache import layer_format
from kvconvert.kernels.decode.triton import DecodeShape, query_columns, query_rows
from kvconvert.kernels.decode.triton.kernel import decode_kernel, extremes_kernel
from kvconvert.kernels.decode.triton.launch import (
    FEW_REGISTERS,
    STAGES,
    combine_block,
    combine_warps,
    decode_shape,
    registers_for,
    warps_for,
)
from kvconvert.kernels.decode.triton.softmax import combine_kernel
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat
from kvconvert.kernels.spans import SpanFormat
from kvconvert.methods import KVScheme

HEADS = 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Channels of keys and of values.
HEAD_SIZES = ((48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
USUAL_HEAD = (128, 128)
# Query heads per KV head, and queries of one program: decoding, and a prompt that follows stored tokens.
ROWS = ((1, 1), (2, 1), (4, 1), (7, 1), (8, 1), (16, 1), (1, 16), (4, 4))
USUAL_ROWS = (4, 1)
# Which side stays longer in full precision, as `DecodeShape.half_quantized` says it.
HALF_QUANTIZED = ("none", "values", "keys")
# Presets that differ in what their pages or spans are.
PRESETS = ("kivi", "oscar", "oscar-g128", "kitty", "kitty-pro", "calibquant-1bit", "calibquant-2bit", "minikv")


@dataclass(frozen=True)
class Layer:
    """The storage of one layer.

    Attributes:
        name: the name of the preset or of what is varied; details: of the latter, for the variant's name.
        format: the format of what it stores; pages may have hidden tokens.
    """

    name: str
    format: LayerFormat
    details: str = ""


@dataclass(frozen=True)
class Pages:
    """A format of pages, or of spans where `span`, without the head size.

    Groups count tokens for keys and channels for values, 0 means static scales. `boost` is the share of boosted
    channels.
    """

    name: str
    key_bits: int = 2
    value_bits: int = 2
    key_group: int = 32
    value_group: int = 32
    norm: str = "none"
    boost: float = 0.0
    select: str = "dynamic"
    half_quantized: str = "none"
    span: bool = False
    scale_bits: int = 16

    def layer(self, head: tuple[int, int]) -> Layer:
        """The layer of these pages with heads of D and E channels."""
        (key_dim, value_dim), static = head, self.key_group == 0
        details = f"-k{self.key_bits}g{self.key_group}-v{self.value_bits}g{self.value_group}"
        details += f"-{self.select}" * bool(self.boost)
        details += f"-full-precision-{self.half_quantized}" * (self.half_quantized != "none")
        if self.span:
            span = SpanFormat(self.key_bits, self.value_bits)
            return Layer(self.name, replace(_unused_pages(*head), span=span), details)
        keys = PageFormat.keys(
            HEADS,
            key_dim,
            PAGE_SIZE,
            self.key_bits,
            self.key_group or PAGE_SIZE,
            token_norm=self.norm,
            boosted=round(self.boost * key_dim),
            fixed_channels=self.select == "calibrated",
            static=static,
            scale_bits=self.scale_bits,
        )
        group = min(self.value_group or value_dim, value_dim)
        values = PageFormat.values(
            HEADS, value_dim, PAGE_SIZE, self.value_bits, group, static=static, scale_bits=self.scale_bits
        )
        windows = {"key_window": self.half_quantized == "keys", "value_window": self.half_quantized == "values"}
        return Layer(self.name, LayerFormat(keys, values, sink_tokens=1, **windows), details)


def preset_layer(name: str, head: tuple[int, int]) -> Layer:
    """The layer of a preset with heads of D and E channels."""
    format = layer_format(KVScheme.preset(name), heads=HEADS, key_dim=head[0], value_dim=head[1])
    return Layer(name, replace(format, sink_tokens=1))


def _unused_pages(key_dim: int, value_dim: int) -> LayerFormat:
    """Pages of a layer that stores spans: only its heads are looked at."""
    keys = PageFormat.keys(HEADS, key_dim, PAGE_SIZE, 2, PAGE_SIZE)
    return LayerFormat(keys, PageFormat.values(HEADS, value_dim, PAGE_SIZE, 2, value_dim))


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
BITS = (1, 2, 3, 4, 8, 16)
# Everything else that a recipe can ask for, in formats of their own.
OTHERS = (
    *(Pages("widths", *bits, 128, 128) for bits in product(BITS, BITS)),
    *(Pages("groups", bits, bits, *groups) for bits in BITS[:-1] for groups in product((16, 32, 64, 128), repeat=2)),
    *(Pages("static", *bits, 0, 0) for bits in product((4, 8), (4, 8))),
    *(Pages("norm", bits, 2, 32, 32, "per_head") for bits in BITS[:-1]),
    *(
        Pages("boost", bits, 2, group, 128, boost=0.125, select=select)
        for bits, group, select in product((2, 4), (32, 128), ("dynamic", "calibrated"))
    ),
    *(Pages("half", bits, bits, 32, 32, half_quantized=side) for bits, side in product(BITS[:-1], ("keys", "values"))),
    *(Pages("span", *bits, span=True) for bits in product(BITS[:-1], repeat=2)),
    *(Pages("bytes", bits, bits, group, group, scale_bits=8) for bits, group in product((1, 2, 3, 4), (32, 128))),
    Pages("bytes", 2, 2, 128, 128, boost=0.125, scale_bits=8),
)


def variants(capability: int) -> Iterator[Variant]:
    """The list of this module for one architecture."""
    for name in PRESETS:
        for head, dtype, rows in product(HEAD_SIZES, DTYPES, ROWS):
            layer = preset_layer(name, head)
            yield from _decode_variants(capability, layer, head, dtype, rows, softcap=False, masked=rows[1] > 1)
        for head, softcap in product(((64, 64), USUAL_HEAD, (256, 256)), (False, True)):
            layer = preset_layer(name, head)
            yield from _decode_variants(capability, layer, head, "bf16", USUAL_ROWS, softcap=softcap, masked=True)
    for pages, head, dtype in product(OTHERS, ((64, 64), USUAL_HEAD), DTYPES):
        layer = pages.layer(head)
        yield from _decode_variants(capability, layer, head, dtype, USUAL_ROWS, softcap=False, masked=False)
    # Full-precision tokens in vLLM's blocks.
    for name, head, dtype in product(("kivi", "oscar-g128", "kitty"), ((64, 64), USUAL_HEAD), ("bf16", "fp16")):
        layer = preset_layer(name, head)
        yield from _decode_variants(
            capability, layer, head, dtype, USUAL_ROWS, softcap=False, masked=False, placed=True
        )
    for (_, value_dim), dtype, rows, sink_logits, most in product(
        HEAD_SIZES, DTYPES, ROWS, (False, True), (16, 64, 256)
    ):
        if value_dim == HEAD_SIZES[-2][1] and dtype != "bf16":
            continue
        yield _combine_variant(capability, value_dim, dtype, rows, sink_logits, most)


def _decode_variants(
    capability: int,
    layer: Layer,
    head: tuple[int, int],
    dtype: str,
    rows: tuple[int, int],
    softcap: bool,
    masked: bool,
    placed: bool = False,
) -> Iterator[Variant]:
    """The decode kernel's variant and, with tau, that of the launch before it."""
    shape = decode_shape(
        layer.format,
        DTYPES[dtype],
        *rows,
        half_quantized=layer.format.half_quantized,
        masked=masked,
        softcap=softcap,
        placed=placed,
    )
    keys = layer.format.keys
    axes = {
        "format": layer.name,
        "key_bits": shape.keys.bits,
        "value_bits": shape.values.bits,
        "key_group": shape.keys.groups and PAGE_SIZE // shape.keys.groups,
        "value_group": shape.values.groups and head[1] // shape.values.groups,
        "norm": keys.token_norm,
        "boost": f"{keys.boosted / keys.head_dim} {'calibrated' if keys.fixed_channels else 'dynamic'}"
        if keys.boosted
        else "none",
        "half_quantized": HALF_QUANTIZED[shape.half_quantized],
        "head_size": head[0],
        "dtype": dtype,
        "rows": f"{rows[0]}x{rows[1]}",
        "masked": masked,
        "softcap": softcap,
        "placed": placed,
    }
    is_usual = (head, dtype, rows, softcap, masked) == (USUAL_HEAD, "bf16", USUAL_ROWS, False, False)
    usual = layer.name if layer.name in PRESETS and is_usual and not placed else ""
    name = f"{layer.name}{layer.details}-{head[0]}x{head[1]}-{dtype}-{rows[0]}x{rows[1]}"
    name += "-masked" * masked + "-softcap" * softcap + "-placed" * placed
    yield page_variant("decode", decode_kernel, name, shape, dtype, axes, usual, capability)
    if shape.tau:
        yield page_variant("extremes", extremes_kernel, name, shape, dtype, axes, usual, capability)


TYPES = {
    "*fp32": "out stats partial extremes sink_logits mean center_mean frequencies",
    "*fp16": "matrix",
    "*i16": "key_base value_base",
    "*i32": "items item_rows slot_rows",
    "*i64": "key_table value_table rows places shared boosted clamped_rows table centers key_rows",
    "*u8": "mask",
    "fp32": "scaling softcap tau1 tau2",
}
POINTERS = {name: kind for kind, names in TYPES.items() for name in names.split()}


def signature(function: object, constants: dict[str, object], types: dict[str, str]) -> dict[str, str]:
    return {name: types.get(name, "i32") for name in function.arg_names if name not in constants}


def page_variant(
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
    both = ((shape.keys.head_dim, shape.keys.bits), (shape.values.head_dim, shape.values.bits))
    rest = "*fp32" if shape.split_query else "*fp16"
    types = POINTERS | {"queries": f"*{dtype}", "residual": f"*{dtype}", "center_rest": rest}
    low = [(size, bits) for size, bits in (both if kernel == "decode" else both[:1]) if bits < 16]
    return Variant(
        f"{kernel}-{name}",
        function,
        signature(function, constants, types),
        constants,
        num_warps=warps_for(shape),
        num_stages=STAGES,
        axes={"kernel": kernel} | ({"usual": f"{kernel} {usual}"} if usual else {}) | axes,
        codes=PAGE_SIZE * sum(size for size, _ in low),
        tensor_cores=True,
        wide_loads=bool(low),
        max_registers=registers_for(shape),
        code_bytes=sum(PAGE_SIZE * size * bits // 8 for size, bits in low),
        most_per_code=USUAL_PER_CODE[usual] if usual else _most_per_code(shape),
        most_local=0.35 if _is_crowded(shape) else 0.05,
        spills=_why_spills(shape),
    )


def _most_per_code(shape: DecodeShape) -> float:
    if 16 in (shape.keys.bits, shape.values.bits):
        return MIXED_PER_CODE
    columns = query_rows(shape) * query_columns(shape)
    return PER_CODE[columns][max(shape.keys.groups, shape.values.groups) > 1]


def _is_crowded(shape: DecodeShape) -> bool:
    """Whether more has to be held at a time than registers hold, even in the main loop."""
    columns = query_rows(shape) * query_columns(shape)
    return columns > 8 or shape.split_query or 16 in (shape.keys.bits, shape.values.bits)


def _why_spills(shape: DecodeShape) -> str:
    """The reason for which registers of a variant do not suffice; empty where they must."""
    if shape.half_quantized:
        return "half-quantized pages hold full-precision tokens beside codes; a sequence has few of them"
    if registers_for(shape) == FEW_REGISTERS:
        return "few registers, so that more programs hide each other's latencies"
    if 16 in (shape.keys.bits, shape.values.bits):
        return "one side of 16 bits beside codes"
    if query_rows(shape) * query_columns(shape) > 8:
        return "more than eight columns of queries"
    if shape.split_query:
        return "queries of 32 bits"
    if max(shape.keys.head_dim, shape.values.head_dim) > 128:
        return "heads of more than 128 channels"
    if (
        max(shape.keys.groups, shape.values.groups) > 4
        or shape.keys.boosted
        or max(shape.keys.bits, shape.values.bits) > 4
    ):
        return "many groups, boosted channels, or codes of 8 bits, whose operands are held at a time"
    if shape.keys.scale == shape.keys.offset >= 0 and max(shape.keys.groups, shape.values.groups) > 1:
        return "scales of 8 bits for several groups, which are dequantized before they are used"
    return ""


def _combine_variant(
    capability: int, value_dim: int, dtype: str, rows: tuple[int, int], sink_logits: bool, most_slots: int
) -> Variant:
    shape = decode_shape(_unused_pages(value_dim, value_dim), DTYPES[dtype], *rows)
    slots, channels = combine_block(most_slots, value_dim)
    constants = {
        "GROUP": rows[0],
        "QUERIES": rows[1],
        "ROWS": query_rows(shape),
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": channels,
        "BLOCK_SLOTS": slots,
        "SINK_LOGITS": sink_logits,
        "HEADS": HEADS,
        "DEPENDENT": capability >= 90,
    }
    constants = {key: value for key, value in constants.items() if key in combine_kernel.arg_names}
    return Variant(
        f"combine-{value_dim}-{dtype}-{rows[0]}x{rows[1]}-{slots}{'-sink_logits' * sink_logits}",
        combine_kernel,
        signature(combine_kernel, constants, POINTERS | {"out": f"*{dtype}"}),
        constants,
        num_warps=combine_warps(slots, channels),
        num_stages=STAGES,
        axes={"kernel": "combine", "value_size": value_dim, "dtype": dtype, "rows": f"{rows[0]}x{rows[1]}"}
        | {"sink_logits": sink_logits, "slots": slots},
    )
