"""Refuses an adapter: an error names folder or file, then the tensor or the config's field."""

from collections.abc import Mapping
from typing import NoReturn

from multilora_cli.adapters.safetensors_header import TensorEntry
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.adapters.tensor_names import Part
from multilora_cli.errors import AdapterError

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class Refusal:
    """Raises the AdapterErrors of one adapter; `where` names its folder or file in all of them."""

    def __init__(self, where: str) -> None:
        self.where = where

    def adapter(self, message: str, reason: str) -> NoReturn:
        """The adapter as a whole is at fault."""
        raise AdapterError(f"{self.where}: {message}", reason=reason)

    def tensor(self, name: str, problem: str, reason: str) -> NoReturn:
        """The tensor `name` is at fault, or lacks what belongs to it."""
        message = f"{self.where}: tensor {quoted(name)}: {problem}"
        raise AdapterError(message, reason=reason, field=name)

    def field(self, name: str, problem: str, reason: str) -> NoReturn:
        """The config's field `name` is at fault, or the tensors that it declares are missing."""
        raise AdapterError(f"{self.where}: {name}: {problem}", reason=reason, field=name)

    def check_dtype(self, entry: TensorEntry) -> None:
        """Refuse weights that are not stored as floats of 16 bits or more."""
        if entry.dtype not in FLOAT_DTYPES:
            expected = ", ".join(FLOAT_DTYPES)
            self.tensor(entry.name, f"dtype {entry.dtype}, expected one of {expected}", "dtype")

    def check_pair(self, found: Mapping[Part, TensorEntry]) -> None:
        """Refuse a module that has one of its two factors alone, or none."""
        name = next(iter(found.values())).name
        factor = "lora_embedding_" if "lora_embedding_" in name else "lora_"
        for part in ("A", "B"):
            if part not in found:
                self.tensor(name, f"has no {factor}{part} beside it", "unpaired")
