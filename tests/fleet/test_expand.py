"""Folder globs become adapters named after their folders."""

from pathlib import Path

import pytest

from multilora_cli.errors import FleetError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import load_fleet


def fleet(tmp_path: Path, adapters: str):
    path = tmp_path / "fleet.yaml"
    path.write_text(f"base: {{model: x, name: demo}}\nadapters: {adapters}\n")
    return load_fleet(path)


def folder(tmp_path: Path, name: str, config: bool = True) -> None:
    (tmp_path / "adapters" / name).mkdir(parents=True)
    if config:
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")


def test_folders_with_a_config_are_adapters(tmp_path: Path) -> None:
    for name in ("b", "a", "c.v2"):
        folder(tmp_path, name)
    folder(tmp_path, "notes", config=False)
    found = expand_adapters(fleet(tmp_path, "[{name: x/y, source: ./x}, {folder: ./adapters/*}]"))
    assert [adapter.name for adapter in found] == ["x/y", "a", "b", "c.v2"]
    assert found[1].source == str(tmp_path / "adapters" / "a")


def test_an_empty_glob_and_twins_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="no folder at"):
        expand_adapters(fleet(tmp_path, "[{folder: ./adapters/*}]"))
    folder(tmp_path, "A")
    with pytest.raises(FleetError, match="same name"):
        expand_adapters(fleet(tmp_path, "[{name: a, source: x}, {folder: ./adapters/*}]"))
    folder(tmp_path, "bad name")
    with pytest.raises(FleetError, match="cannot name an adapter"):
        expand_adapters(fleet(tmp_path, "[{folder: ./adapters/*}]"))


def test_a_folder_named_like_the_base_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, "demo")
    with pytest.raises(FleetError, match="the base's name"):
        expand_adapters(fleet(tmp_path, "[{folder: ./adapters/*}]"))
