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


@triton.constexpr_function
def parts_of(bits):
    """Parts of a k block whose codes share lanes."""
    return PARTS[bits]


@triton.constexpr_function
def lowest_bit(part):
    """Where a byte of lowest bits has that of a part's first class."""
    return LOWEST_BIT[part]


@triton.constexpr_function
def _fields_assembly(bits, part):
    """Both classes' fields of a part, two lanes at a time: $0 and $1 from the lanes $2 and the lowest bits $3."""
    if bits == 8:
        return "{.reg .b32 t; shr.u32 t, $2, 8; and.b32 $0, $2, 0x00FF00FF; and.b32 $1, t, 0x00FF00FF;}"
    if bits == 2:
        return (
            f"{{.reg .b32 t; shr.u32 t, $2, {4 * part}; and.b32 $0, t, 0x00030003; and.b32 $1, t, 0x000C000C;}}"
        )
    shift = f"shr.u32 t, $2, {4 * part - 1}" if part else "shl.b32 t, $2, 1"
    return (
        f"{{.reg .b32 t, u, v, w; {shift}; shr.u32 u, $3, {LOWEST_BIT[part]}; "
        "and.b32 v, t, 0x00060006; and.b32 w, u, 0x00010001; and.b32 t, t, 0x00180018; and.b32 u, u, 0x00040004; "
        "or.b32 $0, v, w; or.b32 $1, t, u;}"
    )


@triton.jit
def fields(lanes, lowest, PART: tl.constexpr, BITS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Codes of a part in int16, of the first class from bit 0 and of the second from bit 2, or at 8 bits from bit 0.

    `lowest` are the bytes with the lowest bits, widened to int16; at other widths than 3 anything of that shape.
    """
    if INLINE_ASM:
        if BITS == 8:
            # Two outputs that share no register with an input still to be read.
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART), "=&r,=&r,r", [lanes], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
            )
        elif BITS == 2:
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART), "=&r,=&r,r", [lanes], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
            )
        else:
            first, second = tl.inline_asm_elementwise(
                _fields_assembly(BITS, PART), "=&r,=&r,r,r", [lanes, lowest],
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
        first, second = first.to(tl.int16), second.to(tl.int16)
    return first, second


@triton.jit
def _with_exponent(field, BITS: tl.constexpr, CLASS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """base + c in bf16, the base being 128 for the first class and 32 for the second; not for 8 bits."""
    if INLINE_ASM:
        if CLASS:
            operand = tl.inline_asm_elementwise(
                "or.b32 $0, $1, 0x42004200;", "=r,r", [field], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            operand = tl.inline_asm_elementwise(
                "or.b32 $0, $1, 0x43004300;", "=r,r", [field], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    else:
        operand = (field | (0x4200 if CLASS else 0x4300)).to(tl.bfloat16, bitcast=True)
    return operand


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
def multiply_codes(field, x, total, BITS: tl.constexpr, CLASS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """total + the products of one class's codes with x; `codes_sum` says what they are in excess of the codes."""
    if x.dtype == tl.float16:
        total = multiply(field.to(tl.float16, bitcast=True), x, total, INLINE_ASM)
    elif BITS == 8:
        low, high = nibbles(field, INLINE_ASM)
        total = multiply(high, x, multiply(low, x, total, INLINE_ASM), INLINE_ASM)
    else:
        total = multiply(_with_exponent(field, BITS, CLASS, INLINE_ASM), x, total, INLINE_ASM)
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

    c - z is exact in either dtype. bf16 has too few bits for the scale, which is therefore multiplied in two parts.
    """
    if not INLINE_ASM:
        code = (field if BITS == 8 or not CLASS else field >> 2).to(tl.float32)
        values = ((code - zero) * scale).to(tl.bfloat16 if BF16 else tl.float16)
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
                "=r,r,r,r,r", [_with_exponent(field, BITS, CLASS, True), zeros, coarse, fine],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        half = scale.to(tl.float16)
        if CLASS and BITS != 8:
            # 1024 + 4 c, brought to c - z by one fused operation.
            zeros = (-256.0 - zero).to(tl.float16)
            values = tl.inline_asm_elementwise(
                "{.reg .b32 t, factor; or.b32 t, $1, 0x64006400; mov.b32 factor, 0x34003400; "
                "fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}",
                "=r,r,r,r", [field, zeros, half], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            zeros = (-1024.0 - zero).to(tl.float16)
            values = tl.inline_asm_elementwise(
                "{.reg .b32 t, factor; or.b32 t, $1, 0x64006400; mov.b32 factor, 0x3C003C00; "
                "fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}",
                "=r,r,r,r", [field, zeros, half], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    return values
