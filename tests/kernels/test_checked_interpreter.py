"""What a card would punish is found: the interpreter as other tests run it."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.interpreter
BLOCK = 8


@triton.jit
def _copy(x_ptr, y_ptr, count, seen, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(y_ptr + at, x, mask=at < seen)


@triton.jit
def _hinted(x_ptr, start, BLOCK: tl.constexpr):
    at = tl.multiple_of(start, 4) + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at.to(tl.float32))


@triton.jit
def _in_turn(order_ptr, count_ptr):
    turn = tl.atomic_add(count_ptr, 1)
    tl.store(order_ptr + turn, tl.program_id(0))


def test_memory_beyond_a_tensor_is_not_read_or_written() -> None:
    x, y = torch.arange(10.0), torch.zeros(16)
    _copy[(2,)](x, y, 10, 10, STEP=BLOCK, BLOCK=BLOCK)
    assert y.tolist() == [*range(10)] + [0] * 6
    for count, seen, which in ((11, 10, "load"), (10, 17, "store")):
        with pytest.raises(Exception, match=f"_copy: a {which} of 1 places beyond"):
            _copy[(3,)](x, y, count, seen, STEP=BLOCK, BLOCK=BLOCK)


def test_what_is_masked_is_undefined() -> None:
    y = torch.zeros(16)
    _copy[(2,)](torch.arange(10.0), y, 10, 12, STEP=BLOCK, BLOCK=BLOCK)
    assert y[:10].tolist() == [*range(10)] and y[10:12].isnan().all() and not y[12:].any()


def test_promises_to_the_compiler_are_held() -> None:
    x = torch.zeros(16)
    _hinted[(1,)](x, 4, BLOCK=BLOCK)
    with pytest.raises(Exception, match="_hinted: not a multiple of 4"):
        _hinted[(1,)](x, 6, BLOCK=BLOCK)


def test_programs_run_in_an_order_of_their_own() -> None:
    order, count = torch.zeros(12, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _in_turn[(12,)](order, count)
    assert sorted(order.tolist()) == list(range(12)) != order.tolist()


def test_memory_that_nobody_wrote_holds_nan() -> None:
    assert torch.empty(5).isnan().all()
