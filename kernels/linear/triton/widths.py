"""Weights of 2, 3 and 8 bits as operands of matrix products, in Triton; 4 bits are in few_rows.py and many_rows.py.

The layout is that of kvconvert.kernels.linear.packed_layout. Two lanes at a time, as at 4 bits, codes are masked in
place and become numbers by the bits of an exponent. At 2 and 3 bits those of the first class are at the low end of a
lane and those of the second at bit 2: in bf16 128 + c and 32 + c, in fp16 the subnormals c 2^-24 and 4 c 2^-24. At 8
bits they are at the low end in fp16, but are more than the 7 bits of bf16's mantissa: there a code is the sum of two
operands, 128 + its low nibble and 256 + its high one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.linear.packed_layout import LOWEST_BIT, PARTS

# What is put over the codes of each class to make numbers of them, twice, for two lanes.
EXPONENTS = {"none": (0, 0), "bf16": (0x43004300, 0x42004200), "fp16": (0x64006400, 0x64006400)}


@triton.constexpr_function
def parts_of(bits):
    """Parts of a k block whose codes share lanes."""
    return PARTS[bits]


@triton.constexpr_function
def lowest_bit(part):
    """Where a byte of lowest bits has that of a part's first class."""
    return LOWEST_BIT[part]


@triton.constexpr_function
def product_exponent(bits, bf16):
    """The exponent with which fields are multiplied: fp16's subnormals need none, nor do codes that are cut in two."""
    return "bf16" if bf16 and bits != 8 else "none"


@triton.constexpr_function
def value_exponent(bits, bf16):
    """The exponent from which fields become weights."""
    return "fp16" if not bf16 else "none" if bits == 8 else "bf16"


@triton.constexpr_function
def exponent_of(kind, number):
    """The exponent of one class, for one lane."""
    return EXPONENTS[kind][number] & 0xFFFF


@triton.constexpr_function
def _fields_assembly(bits, part, kind):
    """Both classes' fields of a part, two lanes at a time: $0 and $1 from the lanes $2 and the lowest bits $3."""
    first, second = (f"0x{exponent:08X}" for exponent in EXPONENTS[kind])
    if bits == 8:
        return (
            f"{{.reg .b32 t; shr.u32 t, $2, 8; lop3.b32 $0, $2, 0x00FF00FF, {first}, 0xEA; "
            f"lop3.b32 $1, t, 0x00FF00FF, {second}, 0xEA;}}"
        )
    if bits == 2:
        return (
            f"{{.reg .b32 t; shr.u32 t, $2, {4 * part}; lop3.b32 $0, t, 0x00030003, {first}, 0xEA; "
            f"lop3.b32 $1, t, 0x000C000C, {second}, 0xEA;}}"
        )
    shift = f"shr.u32 t, $2, {4 * part - 1}" if part else "shl.b32 t, $2, 1"
    return (
        f"{{.reg .b32 t, u, v, w; {shift}; shr.u32 u, $3, {LOWEST_BIT[part]}; "
        f"lop3.b32 v, t, 0x00060006, {first}, 0xEA; lop3.b32 w, t, 0x00180018, {second}, 0xEA; "
        "lop3.b32 $0, u, 0x00010001, v, 0xEA; lop3.b32 $1, u, 0x00040004, w, 0xEA;}"
    )


@triton.jit
def widened(lowest, INLINE_ASM: tl.constexpr):
    """Bytes as int16, of which only the low byte means anything."""
    if INLINE_ASM:
        wide = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
            "=&r,=r,r", [lowest], dtype=tl.int16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = lowest.to(tl.int16)
    return wide


@triton.jit
def fields(lanes, lowest, PART: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Codes of a part in int16, of the first class from bit 0 and of the second from bit 2, or at 8 bits from bit 0.

    Args:
        lanes: of one k block.
        lowest: the bytes with the lowest bits, `widened`; at other widths than 3 anything of that shape.
        PART: which part.
        EXPONENT: "none"; "bf16" for 128 + c and 32 + c; "fp16" for 1024 + c and 1024 + 4 c.
    """
    if INLINE_ASM:
        # The outputs share no register with an input still to be read.
        if BITS == 3:
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART, EXPONENT), "=&r,=&r,r,r", [lanes, lowest],
                dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART, EXPONENT), "=&r,=&r,r", [lanes],
                dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        wide = lanes.to(tl.int32)
        if BITS == 8:
            first, second = wide & 255, (wide >> 8) & 255
        elif BITS == 2:
            first, second = (wide >> (4 * PART)) & 3, (wide >> (4 * PART)) & 12
        else:
            bits = lowest.to(tl.int32) >> lowest_bit(PART)
            upper = (wide << 1) >> (4 * PART)
            first, second = (upper & 6) | (bits & 1), (upper & 24) | (bits & 4)
        first = (first | exponent_of(EXPONENT, 0)).to(tl.int16)
        second = (second | exponent_of(EXPONENT, 1)).to(tl.int16)
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
def ones_like(lowest, BF16: tl.constexpr):
    """Ones in the layout that the compiler gives to operands made of bytes; the rows' sums then read the same x."""
    if BF16:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3F803F80;", "=r,r", [lowest], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3C003C00;", "=r,r", [lowest], dtype=tl.float16, is_pure=True, pack=2
        )
    return ones


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
def lowest_pointer(lanes, K_BLOCK: tl.constexpr):
    """The bytes with the lowest bits of a 3-bit weight's first block."""
    return (lanes + 4 * K_BLOCK).to(tl.pointer_type(tl.int8))


@triton.jit
def codes_sum(product, sums, zero, BITS: tl.constexpr, CLASS: tl.constexpr, BF16: tl.constexpr):
    """sum (c - z) x from the products of `multiply_codes` and the sums of x, in float32."""
    if BF16:
        base = 384.0 if BITS == 8 else (32.0 if CLASS else 128.0)
        return product - (zero + base) * sums
    # fp16's subnormals back to codes.
    return product * (2.0**22 if CLASS and BITS != 8 else 2.0**24) - zero * sums


@triton.jit
def values_of(
    field, scale, zero, BITS: tl.constexpr, CLASS: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr
):
    """(c - z) scale of one class's codes, rounded once or nearly so to fp16 or bf16.

    Fields have the exponent `value_exponent`. c - z is exact in either dtype. bf16 has too few bits for the scale,
    which is therefore multiplied in two parts.
    """
    if not INLINE_ASM:
        code = field.to(tl.int32) & (255 if BITS == 8 else 31)
        code = code if BITS == 8 else ((code & 28) >> 2 if CLASS else code & 7)
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
            zeros = ((-32.0 if CLASS else -128.0) - zero).to(tl.bfloat16)
            values = tl.inline_asm_elementwise(
                "{.reg .b32 d, one, none; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000; "
                "fma.rn.bf16x2 d, $1, one, $2; fma.rn.bf16x2 none, d, $4, none; fma.rn.bf16x2 $0, d, $3, none;}",
                "=r,r,r,r,r", [field, zeros, coarse, fine], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    elif CLASS and BITS != 8:
        # 1024 + 4 c, brought to c - z by one fused operation.
        values = tl.inline_asm_elementwise(
            "{.reg .b32 t, factor; mov.b32 factor, 0x34003400; fma.rn.f16x2 t, $1, factor, $2; "
            "mul.rn.f16x2 $0, t, $3;}",
            "=r,r,r,r", [field, (-256.0 - zero).to(tl.float16), scale.to(tl.float16)],
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
