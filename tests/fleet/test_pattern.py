"""Name patterns: what they cover, where it is, and that no name leads out of there."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multilora_cli.errors import FleetError
from multilora_cli.fleet.declared import declared_patterns
from multilora_cli.fleet.load import load_fleet
from multilora_cli.fleet.pattern import NamePattern

TENANTS = NamePattern("{tenant}/{name}", "s3://bucket/{tenant}/x/{name}/")


@pytest.mark.parametrize(
    ("pattern", "source", "name", "expected"),
    [
        ("{tenant}/{name}", "s3://b/{tenant}/{name}/", "acme/legal", "s3://b/acme/legal/"),
        ("{name}", "./adapters/{name}", "legal-v2", "./adapters/legal-v2"),
        ("acme/{name}", "hf://acme-ai/{name}@main", "acme/legal", "hf://acme-ai/legal@main"),
        ("acme/{name}", "hf://acme-ai/{name}", "other/legal", None),
        ("v1-{name}", "./a/{name}/v1", "v1-x", "./a/x/v1"),
        ("v1-{name}", "./a/{name}/v1", "v1-", None),
        ("{a}.lora/{b}", "./{b}/{a}/{a}", "x.y.lora/z", "./z/x.y/x.y"),
        ("{tenant}/{name}", "./{tenant}/{name}", "acme", None),
        ("{tenant}", "./{tenant}", "acme/legal", None),
    ],
)
def test_what_is_covered(pattern: str, source: str, name: str, expected: str | None) -> None:
    assert NamePattern(pattern, source).source_of(name) == expected


@given(st.text(alphabet="ab./%2fF\\\0~{}*-_ \n", max_size=20) | st.text(max_size=12))
@example("../x")
@example("a/..")
@example("a/../../etc")
@example("a%2f..%2fb/c")
@example("x/.hidden")
@example("v..")
@example("a/b\n")
def test_no_name_leaves_its_folder(name: str) -> None:
    """RELIABILITY 8.6: for all names the result is inside the root, or there is none."""
    for pattern in ("{tenant}/{name}", "v{name}", "{name}", "x/{name}.y"):
        holes = "/".join(part for part in ("{tenant}", "{name}") if part in pattern)
        found = NamePattern(pattern, f"/root/adapters/{holes}").source_of(name)
        if found is not None:
            assert os.path.normpath(found) == found and found.startswith("/root/adapters/")
            assert not {"", ".", ".."} & set(found.split("/")[1:])


@pytest.mark.parametrize(
    ("pattern", "source", "problem"),
    [
        ("acme", "s3://b/acme/", "at least one"),
        ("{a}{b}", "s3://b/{a}/{b}/", "one placeholder a part"),
        ("{a}-{b}", "s3://b/{a}/{b}/", "one placeholder a part"),
        ("{a}/{b}/{c}", "s3://b/{a}/{b}/{c}/", "two parts"),
        ("{a}/{a}", "s3://b/{a}/", "each of the pattern's"),
        ("{tenant}/{name}", "s3://b/{name}/", "each of the pattern's placeholders"),
        ("{name}", "s3://b/{name}/{tenant}/", "each of the pattern's placeholders"),
        ("{Name}", "s3://b/{Name}/", "two parts"),
        ("{name", "s3://b/{name/", "two parts"),
        ("{name}", "s3://b/{name}/}", "stray braces"),
        ("../{name}", "./{name}", "two parts"),
        (".{name}", "./{name}", "two parts"),
        ("/{name}", "./{name}", "two parts"),
        ("*{name}", "./{name}", "two parts"),
        ("{name}", "demo:{name}", "folder, hf:// or s3://"),
    ],
)
def test_mistakes_are_told_with_their_place(
    tmp_path: Path, pattern: str, source: str, problem: str
) -> None:
    """F80: the key, what was found, what was expected."""
    text = f'base: {{model: x}}\nadapters:\n  - pattern: "{pattern}"\n    source: "{source}"\n'
    (tmp_path / "fleet.yaml").write_text(text)
    with pytest.raises(FleetError) as caught:
        load_fleet(tmp_path / "fleet.yaml")
    assert "fleet.yaml:3:" in caught.value.message and "adapters.0" in caught.value.message
    assert problem in caught.value.message


def test_folders_are_absolute_and_patterns_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "base: {model: x}\nadapters:\n"
        '  - {pattern: "acme/{name}", source: "./acme/{name}", ttl: 1h, priority: 2}\n'
        '  - {pattern: "{tenant}/{name}", source: "s3://b/{tenant}/{name}/"}\n'
    )
    local, remote = declared_patterns(load_fleet(tmp_path / "fleet.yaml"))
    assert (local.ttl, local.priority, local.is_local) == (3600, 2, True)
    assert local.source_of("acme/x") == str(tmp_path / "acme" / "x")
    assert local.root == f"{tmp_path}/acme/"
    assert not remote.is_local and remote.root == "s3://b/"
