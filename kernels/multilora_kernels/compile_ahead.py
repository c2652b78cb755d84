"""Compiles kernels on several threads before the first of them is needed.

A launch compiles its kernel where it was not compiled before, 0.5 to 2 s on one core, and one after
the other an 8B needs 33 s of them. Most of that time is spent outside the interpreter, in LLVM and
in ptxas, so threads share it well: 10 % of it holds the interpreter. What launches a kernel is
compiled too, by the C compiler, once for every list of argument types: 5 s more for an 8B.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

_THREADS_MAX = 32  # an 8B has 54 kernels; a thread takes 15 MB, and ptxas 50 beside it


def compile_threads() -> int:
    """As many as this process has cores."""
    return min(len(os.sched_getaffinity(0)), _THREADS_MAX)


@contextmanager
def compile_only(num_threads: int | None = None) -> Iterator[None]:
    """Within it launches run nothing: kernels that are not compiled yet are, on other threads; at
    its end they are on the device.

    It holds for launches of every thread of the process. What does not compile is left to the
    launch that needs it, which then says why. What a launch would write is not written.
    """
    launch: Callable[..., Any] = JITFunction.run

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    device = driver.active.get_current_device()
    threads = ThreadPoolExecutor(
        num_threads or compile_threads(),
        thread_name_prefix="compile",
        initializer=lambda: driver.active.set_current_device(device),
    )
    with threads:
        with AsyncCompileMode(threads, ignore_errors=True) as mode:
            JITFunction.run = compile_instead
            try:
                yield
            finally:
                JITFunction.run = launch
        list(threads.map(_load, mode.future_kernels.values()))


def _load(future: FutureKernel) -> None:
    """Make the kernel's launcher, and bring it to the device."""
    try:
        kernel = future.result()
    except Exception:
        return
    with suppress(OutOfResources):  # said again by its launch
        _ = kernel.run
