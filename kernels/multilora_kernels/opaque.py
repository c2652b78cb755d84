"""Values that the compiler cannot see through: what is done with them stays where it is written."""

import triton
import triton.language as tl

# The interpreter knows no inline assembly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def opaque(x):
    """x itself, of 16 or 32 bits."""
    if _INTERPRETED:
        return x
    PACKED: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACKED
    )
