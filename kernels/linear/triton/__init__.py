"""Weights of 2, 3 and 8 bits as operands of matrix products, in Triton; 4 bits are in few_rows.py and many_rows.py.

The layout is that of kvconvert.kernels.linear.packed_layout. Two lanes at a time, as at 4 bits, codes are masked in
place and become numbers by the bits of an exponent. At 2 bits those of the first class are at the low end of a lane and
those of the second at bit 2: in bf16 128 + c and 32 + c, in fp16 the subnormals c 2^-24 and 4 c 2^-24. At 3 bits the
second class is at bit 3: 16 + c, and 8 c 2^-24. At 8 bits codes are at the low end in fp16, but are more than the 7
bits of bf16's mantissa: there a code is the sum of two operands, 128 + its low nibble and 256 + its high one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.linear.packed_layout import PARTS, PLACES


@triton.constexpr_function
def parts_of(bits):
    """Parts of a k block whose codes share lanes."""
    return PARTS[bits]


@triton.constexpr_function
def second_bit(bits):
    """Where `fields` leaves the codes of the second class."""
    return 0 if bits == 8 else bits


@triton.constexpr_function
def product_exponent(bits, bf16):
    """The exponent with which fields are multiplied: fp16's subnormals need none, nor do codes that are cut in two."""
    return "bf16" if bf16 and bits != 8 else "none"


@triton.constexpr_function
def value_exponent(bits, bf16):
    """The exponent from which fields become weights."""
    return "fp16" if not bf16 else "none" if bits == 8 else "bf16"


@triton.constexpr_function
def exponent_of(kind, bits, number):
    """What is put over the codes of a class to make numbers of them, in one lane."""
    if kind == "none":
        return 0
    # In bf16 the exponent for which a code's lowest bit is worth one.
    return 0x6400 if kind == "fp16" else 0x4300 - 0x80 * (bits * number)


@triton.constexpr_function
def _fields_assembly(bits, part, kind):
    """Both classes' fields of a part, two lanes at a time: $0 and $1 from the matrices of lanes $2, $3 and $4."""
    lines = []
    for number in (0, 1):
        first = 0 if bits == 8 else bits * number
        found = PLACES[bits][part][number]
        if len(found) == 1:
            matrix, place, _, _ = found[0]
            source = f"${matrix + 2}"
            if place > first:
                lines.append(f"shr.u32 t, {source}, {place - first}")
                source = "t"
        else:
            # Bits 3, 4 and 5 are each chosen from another matrix.
            lines += [f"shr.u32 {name}, ${2 + matrix}, {12 - matrix}" for matrix, name in enumerate("tuv")]
            lines += ["lop3.b32 t, t, u, 0x00080008, 0xE4", "lop3.b32 t, t, v, 0x00180018, 0xE4"]
            source = "t"
        mask, exponent = (2**bits - 1 << first) * 0x10001, exponent_of(kind, bits, number) * 0x10001
        lines.append(f"lop3.b32 ${number}, {source}, 0x{mask:08X}, 0x{exponent:08X}, 0xEA")
    return "{.reg .b32 t, u, v; " + "; ".join(lines) + ";}"


@triton.jit
def _masked(matrix, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return (matrix.to(tl.int32) >> SHIFT) & MASK


@triton.jit
def fields(
    lanes,
    second_lanes,
    third_lanes,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """Codes of a part in int16, of the first class from bit 0 and of the second from bit `second_bit`.

    Args:
        lanes: the lanes of one k block; at 3 bits its first matrix.
        second_lanes, third_lanes: the others at 3 bits, `lanes` again elsewhere.
        PART: which part.
        EXPONENT: "none"; "bf16" for 128 + c and 2^(7 - BITS) + c; "fp16" for 1024 + c and 1024 + 2^BITS c.
    """
    if INLINE_ASM:
        # The outputs share no register with an input still to be read.
        if BITS == 3:
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART, EXPONENT), "=&r,=&r,r,r,r", [lanes, second_lanes, third_lanes],
                dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART, EXPONENT), "=&r,=&r,r", [lanes],
                dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if BITS == 8:
            first, second = _masked(lanes, 0, 255), _masked(lanes, 8, 255)
        elif BITS == 2:
            first, second = _masked(lanes, 4 * PART, 3), _masked(lanes, 4 * PART, 12)
        elif PART == 6:
            first, second = _masked(lanes, 12, 7), _masked(second_lanes, 9, 56)
        elif PART == 7:
            first = _masked(third_lanes, 12, 7)
            second = _masked(lanes, 12, 8) | _masked(second_lanes, 11, 16) | _masked(third_lanes, 10, 32)
        else:
            matrix = lanes if PART % 3 == 0 else second_lanes if PART % 3 == 1 else third_lanes
            first, second = _masked(matrix, PART // 3 * 6, 7), _masked(matrix, PART // 3 * 6, 56)
        first = (first | exponent_of(EXPONENT, BITS, 0)).to(tl.int16)
        second = (second | exponent_of(EXPONENT, BITS, 1)).to(tl.int16)
    return first, second


@triton.jit
def nibbles(field, INLINE_ASM: tl.constexpr):
    """128 + the low nibble and 256 + 16 times the high one of a code of 8 bits, in bf16."""
    if INLINE_ASM:
        low, high = tl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $2, 1; lop3.b32 $0, $2, 0x000F000F, 0x43004300, 0xEA; "
            "lop3.b32 $1, t, 0x00780078, 0x43804380, 0xEA;}",
            "=&r,=&r,r", [field], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = ((field & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        high = (((field >> 1) & 0x78) | 0x4380).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def multiply(left, right, total, COMPILED: tl.constexpr):
    """total + left right in float32; Triton's interpreter knows no bfloat16 there."""
    if not COMPILED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def multiply_codes(field, x, total, BITS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """total + the products of one class's codes with x; `codes_sum` says what they are in excess of the codes.

    Fields have the exponent `product_exponent`.
    """
    if x.dtype == tl.float16:
        total = multiply(field.to(tl.float16, bitcast=True), x, total, INLINE_ASM)
    elif BITS == 8:
        low, high = nibbles(field, INLINE_ASM)
        total = multiply(high, x, multiply(low, x, total, INLINE_ASM), INLINE_ASM)
    else:
        total = multiply(field.to(tl.bfloat16, bitcast=True), x, total, INLINE_ASM)
    return total


@triton.jit
def codes_sum(product, sums, zero, BITS: tl.constexpr, CLASS: tl.constexpr, BF16: tl.constexpr):
    """sum (c - z) x from the products of `multiply_codes` and the sums of x, in float32."""
    if BF16:
        base = 384.0 if BITS == 8 else 128.0 / 2 ** (BITS * CLASS)
        return product - (zero + base) * sums
    # fp16's subnormals back to codes.
    return product * 2.0 ** (24 - CLASS * second_bit(BITS)) - zero * sums


@triton.constexpr_function
def _quotient_assembly(bits):
    """$0 = ($1 / 2^bits + $2) $3 in fp16, two at a time."""
    factor = 0x3C00 - 0x400 * bits
    return (
        f"{{.reg .b32 t, factor; mov.b32 factor, 0x{factor * 0x10001:08X}; fma.rn.f16x2 t, $1, factor, $2; "
        "mul.rn.f16x2 $0, t, $3;}"
    )


@triton.jit
def values_of(
    field, scale, zero, BITS: tl.constexpr, CLASS: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr
):
    """(c - z) scale of one class's codes, rounded once or nearly so to fp16 or bf16.

    Fields have the exponent `value_exponent`. c - z is exact in either dtype. bf16 has too few bits for the scale,
    which is therefore multiplied in two parts.
    """
    if not INLINE_ASM:
        code = (field.to(tl.int32) >> (CLASS * second_bit(BITS))) & (2**BITS - 1)
        values = ((code.to(tl.float32) - zero) * scale).to(tl.bfloat16 if BF16 else tl.float16)
    elif BF16:
        coarse = scale.to(tl.bfloat16)
        fine = (scale - coarse.to(tl.float32)).to(tl.bfloat16)
        if BITS == 8:
            low, high = nibbles(field, INLINE_ASM)
            # Either nibble of the zero leaves its own operand exactly.
            high_zero = (zero.to(tl.int32) & 0xF0).to(tl.float32)
            zeros = (-128.0 - (zero - high_zero)).to(tl.bfloat16)
            high_zeros = (-256.0 - high_zero).to(tl.bfloat16)
            values = tl.inline_asm_elementwise(
                "{.reg .b32 d, e, one, none; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000; "
                "fma.rn.bf16x2 d, $1, one, $3; fma.rn.bf16x2 e, $2, one, $4; fma.rn.bf16x2 d, d, one, e; "
                "fma.rn.bf16x2 none, d, $6, none; fma.rn.bf16x2 $0, d, $5, none;}",
                "=r,r,r,r,r,r,r", [low, high, zeros, high_zeros, coarse, fine],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            zeros = (-128.0 / 2 ** (BITS * CLASS) - zero).to(tl.bfloat16)
            values = tl.inline_asm_elementwise(
                "{.reg .b32 d, one, none; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000; "
                "fma.rn.bf16x2 d, $1, one, $2; fma.rn.bf16x2 none, d, $4, none; fma.rn.bf16x2 $0, d, $3, none;}",
                "=r,r,r,r,r", [field, zeros, coarse, fine], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    elif CLASS and BITS != 8:
        # 1024 + 2^BITS c, brought to c - z by one fused operation.
        values = tl.inline_asm_elementwise(
            _quotient_assembly(BITS),
            "=r,r,r,r", [field, (-1024.0 / 2**BITS - zero).to(tl.float16), scale.to(tl.float16)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = tl.inline_asm_elementwise(
            "{.reg .b32 t, factor; mov.b32 factor, 0x3C003C00; fma.rn.f16x2 t, $1, factor, $2; "
            "mul.rn.f16x2 $0, t, $3;}",
            "=r,r,r,r", [field, (-1024.0 - zero).to(tl.float16), scale.to(tl.float16)],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return values
