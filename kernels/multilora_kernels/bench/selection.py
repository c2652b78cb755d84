"""Which cases a command line names."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from multilora_kernels.bench.timing import Case

MODULES = ("attention", "lora", "gemm", "layer", "elementwise", "sampling")


@dataclass(frozen=True)
class Selection:
    """Cases by parts of their op's name and of their shape's label; empty and None: all."""

    ops: tuple[str, ...] = ()
    shape: str | None = None

    def cases(self) -> Iterator[Case]:
        """The cases of every module, in order."""
        for name in MODULES:
            for case in importlib.import_module(f"multilora_kernels.bench.{name}").cases():
                if self.ops and not any(part in case.op for part in self.ops):
                    continue
                if self.shape is None or self.shape in case.label:
                    yield case
