"""Reading `awq_pack.py`'s words on the device: shared by the kernels that multiply by them.

A packed 32-bit word holds two neighbouring inputs of each quarter of a block, so a shift, one logic
operation and one addition give two weights q - zero, exact in bf16 and fp16.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _exact_asm(shift, fp16):
    # magic: an exponent under which 4 mantissa bits count in ones: bf16 128 + q, fp16 1024 + q.
    magic, one = ("0x64006400", "0x3C003C00") if fp16 else ("0x43004300", "0x3F803F80")
    move = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    kind = "f16x2" if fp16 else "bf16x2"
    return (
        f"{{ .reg .b32 t, o; {move} lop3.b32 t, t, 0x000F000F, {magic}, 0xEA;"
        f" mov.b32 o, {one}; fma.rn.{kind} $0, t, o, $2; }}"
    )


@triton.constexpr_function
def _scaled_asm(shift, fp16, two_scales):
    kind = "f16x2" if fp16 else "bf16x2"
    exact = _exact_asm(shift, fp16).replace("$0", "t")[:-1]
    # A product is written as a sum with zero: bf16 has no multiplication of its own before sm_90.
    times = f"{exact} .reg .b32 z; mov.b32 z, 0; fma.rn.{kind}"
    if two_scales:  # (q - zero) * low is exact, and the sum rounds once
        return f"{times} o, t, $4, z; fma.rn.{kind} $0, t, $3, o; }}"
    return f"{times} $0, t, $3, z; }}"


@triton.jit
def negated_zero(meta, CT: tl.constexpr):
    """-(magic + zero) in CT, or -zero under the interpreter (CT is fp32 there)."""
    zero = meta & 0xF
    if tl.float32 == CT:
        negated = -zero.to(tl.float32)
    elif tl.float16 == CT:
        negated = (zero | 0xE400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        negated = (zero | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return negated


@triton.jit
def scale_of(meta, SCALE: tl.constexpr):
    """The scales of `meta` in fp32."""
    bits = meta >> 16
    if tl.float16 == SCALE:
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # the upper half of an fp32 is a bf16
        scale = (bits << 16).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def exact_weights(words, neg_zero, QUARTER: tl.constexpr, CT: tl.constexpr):
    """q - zero of one quarter of a block, exact, in CT; two weights per instruction."""
    if tl.float32 == CT:
        w = ((words.to(tl.int32) >> (4 * QUARTER)) & 0xF).to(tl.float32) + neg_zero
    elif tl.float16 == CT:
        w = tl.inline_asm_elementwise(
            _exact_asm(4 * QUARTER, True), "=r,r,r", [words, neg_zero], tl.float16, True, 2
        )
    else:
        w = tl.inline_asm_elementwise(
            _exact_asm(4 * QUARTER, False), "=r,r,r", [words, neg_zero], tl.bfloat16, True, 2
        )
    return w


@triton.jit
def scaled_weights(
    words, neg_zero, scale, QUARTER: tl.constexpr, CT: tl.constexpr, SCALE: tl.constexpr
):
    """(q - zero) * scale of one quarter of a block, rounded once to CT. scale is fp32 [N, 1]."""
    if tl.bfloat16 == CT:
        high = scale.to(tl.bfloat16)
        if tl.float16 == SCALE:  # 11 bits: 8 in `high`, at most 3 in `low`
            low = (scale - high.to(tl.float32)).to(tl.bfloat16)
            w = tl.inline_asm_elementwise(
                _scaled_asm(4 * QUARTER, False, True), "=r,r,r,r,r",
                [words, neg_zero, high, low], tl.bfloat16, True, 2,
            )  # fmt: skip
        else:
            w = tl.inline_asm_elementwise(
                _scaled_asm(4 * QUARTER, False, False), "=r,r,r,r",
                [words, neg_zero, high], tl.bfloat16, True, 2,
            )  # fmt: skip
    elif tl.float16 == CT and tl.float16 == SCALE:
        w = tl.inline_asm_elementwise(
            _scaled_asm(4 * QUARTER, True, False), "=r,r,r,r",
            [words, neg_zero, scale.to(tl.float16)], tl.float16, True, 2,
        )  # fmt: skip
    else:  # bf16 scales may lie outside fp16's range
        w = (exact_weights(words, neg_zero, QUARTER, CT).to(tl.float32) * scale).to(CT)
    return w
