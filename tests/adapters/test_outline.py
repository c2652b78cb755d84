"""Outlines: the same as a full read says, and refused wherever that refuses."""

from pathlib import Path

import pytest

from multilora_cli.adapters.outline import OutlineReader
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters.adapter_oracle import copy_of, edit_config
from tests.adapters.malformed import KINDS
from tests.adapters.spoil import WEIGHTS, write_good


def test_twins_are_recognised_and_equal(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = read_geometry(base)
    reader = OutlineReader(geometry, max_rank=64)
    first = write_good(tmp_path / "first")
    outline = reader.read(first)
    assert outline.ranks == read_adapter(first, geometry, max_rank=64).ranks
    twin = copy_of(first, tmp_path / "twin")
    content = bytearray((twin / WEIGHTS).read_bytes())
    content[-2:] = b"\x00\x00"  # other weights, the same shape
    (twin / WEIGHTS).write_bytes(content)

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("read in full")

    monkeypatch.setattr("multilora_cli.adapters.outline.read_adapter", unexpected)
    assert reader.read(twin) is outline
    with pytest.raises(AssertionError, match="read in full"):
        reader.read(edit_config(twin, lora_alpha=99))


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if kind.when == "header"])
def test_knowing_the_good_one_lets_no_bad_one_pass(base: Path, tmp_path: Path, name: str) -> None:
    """G01 for planning: all malformed kinds, each after its sound twin was read."""
    reader = OutlineReader(read_geometry(base), max_rank=64)
    reader.read(write_good(tmp_path / "good"))
    folder = write_good(tmp_path / "acme")
    KINDS[name].build(folder)
    with pytest.raises(AdapterError, match=str(folder)):
        reader.read(folder)
