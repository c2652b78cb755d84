"""Sources: folders, demo, dummy; and which paths a client may name (A-SEC-01)."""

import json
import os
import re
from pathlib import Path

import pytest

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.adapters.source import make_dummies, resolve_source
from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.source.demo import DemoSource
from multilora_cli.adapters.source.dummy import parse_spec
from multilora_cli.adapters.source.local import allowed_folder
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters.adapter_oracle import assert_equals_peft, built, plan_for
from tests.adapters.spoil import write_good
from tests.signature import SEVEN


def test_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-CFG-19: relative to the fleet file, ~ expanded, `..` and slashes tidied."""
    monkeypatch.setenv("HOME", "/home/acme")
    for spec, expected in {
        "./adapters/a": tmp_path / "adapters" / "a",
        "adapters/a/": tmp_path / "adapters" / "a",
        "../x": tmp_path.parent / "x",
        "/srv/a": Path("/srv/a"),
        "~/a": Path("/home/acme/a"),
        "a b/ü": tmp_path / "a b" / "ü",
    }.items():
        assert resolve_source(spec, relative_to=tmp_path) == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hf://org/name@main", "no disk cache"),
        ("s3://bucket/a/", "no disk cache"),
        ("https://host/a", "a URL"),
        ("file:/etc", "a URL"),
        ("", "printable"),
        ("a\0b", "printable"),
        ("a\x1b[2J", "printable"),
        ("x" * 5000, "4096"),
        ("~nobody-here/a", "no such user"),
        ("demo:none", "no such demo adapter"),
        ("demo:../../engine", "no such demo adapter"),
        ("dummy:rank=0", "rank: found '0', expected 1 to 512"),
        ("dummy:rank=513", "expected 1 to 512"),
        ("dummy:rank=" + "9" * 30, "expected 1 to 512"),
        ("dummy:rank=\u0663", "expected 1 to 512"),
        ("dummy:size=3", "expected one of rank=, alpha=, targets=, seed=, layers="),
        ("dummy:rank=1,rank=2", "once"),
        ("dummy:targets=q_proj+head", "targets: found 'q_proj+head'"),
        ("dummy:seed=-1", "seed"),
        ("dummy:layers=0", "layers: found '0', expected 1 to 1000"),
    ],
)
def test_refused_sources(tmp_path: Path, spec: str, words: str) -> None:
    """What is no source is refused by one printable line."""
    with pytest.raises(AdapterError, match=re.escape(words)) as caught:
        resolve_source(spec, relative_to=tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_demo_adapters(tmp_path: Path) -> None:
    """A name in the package's demo folder; anything else lists what there is."""
    write_good(tmp_path / "demo" / "upper")
    (tmp_path / "demo" / "notes").mkdir()
    source, context = DemoSource(tmp_path / "demo"), SourceContext(tmp_path)
    assert source.resolve("upper", context) == tmp_path / "demo" / "upper"
    for name in ("notes", "lower", "", "../demo/upper", "/etc"):
        with pytest.raises(AdapterError, match="there are upper"):
            source.resolve(name, context)


def test_dummy_is_deterministic(base: Path, tmp_path: Path) -> None:
    """Seed and geometry decide every byte; PEFT reads the folder like any other."""
    geometry = read_geometry(base)

    def make(spec: str, cache: str = "cache") -> Path:
        path = tmp_path / cache
        return resolve_source(spec, relative_to=tmp_path, geometry=geometry, cache=path)

    folder = make("dummy:rank=5,targets=all,seed=3")
    assert make("dummy:seed=3,rank=5") == folder
    other = make("dummy:rank=5,targets=all,seed=3", "elsewhere")
    adapters = [read_adapter(path, geometry, max_rank=8) for path in (folder, other)]
    assert content_digest(adapters[0]) == content_digest(adapters[1])
    assert adapters[0].modules == SEVEN and adapters[0].scalings[1, "q_proj"] == 2.0
    assert_equals_peft(folder, base)
    assert sorted(os.listdir(tmp_path / "cache")) == [folder.name]  # nothing temporary stays
    different = {make(f"dummy:{s}").name for s in ("seed=4", "rank=4", "alpha=1", "targets=mlp")}
    assert len(different) == 4
    digest = content_digest(adapters[0])
    assert digest == DUMMY_DIGEST, "the bytes of a dummy adapter changed: raise _FORMAT"


DUMMY_DIGEST = "f52282dc57d491a84c524a5a5e4f1a06d8bd775fac851afb2e1fc82e480269b2"


def test_dummy_values(base: Path, tmp_path: Path) -> None:
    """A within 1 / sqrt(d_in), B within 0.02, both spread over their range, none of it zero."""
    geometry = read_geometry(base)
    folder = resolve_source(
        "dummy:rank=16,targets=q_proj+down_proj", relative_to=tmp_path, geometry=geometry,
        cache=tmp_path,
    )  # fmt: skip
    adapter = read_adapter(folder, geometry, max_rank=64)
    assert adapter.modules == ("q_proj", "down_proj")
    built(adapter, plan_for(adapter, geometry))
    from safetensors.torch import load_file

    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        limit = tensor.shape[1] ** -0.5 if "lora_A" in name else 0.02
        values = tensor.float().abs()
        assert 0.9 * limit < float(values.max()) <= 1.01 * limit
        assert 0.4 * limit < float(values.mean()) < 0.6 * limit
        assert abs(float(tensor.float().mean())) < 0.1 * limit


def test_dummy_layers_behind_the_first_take_no_disk(base: Path, tmp_path: Path) -> None:
    """Thousands of adapters fit a disk: all tensors are there, and those of layer 1 are a hole."""
    geometry = read_geometry(base)

    def make(spec: str) -> Path:
        return resolve_source(spec, relative_to=tmp_path, geometry=geometry, cache=tmp_path)

    whole, first = make("dummy:rank=64,seed=7"), make("dummy:rank=64,seed=7,layers=1")
    from safetensors.torch import load_file

    name = "adapter_model.safetensors"
    one, other = load_file(whole / name), load_file(first / name)
    assert one.keys() == other.keys() and geometry.num_layers == 2
    for key, tensor in other.items():
        assert bool(tensor.any()) == (".layers.0." in key), key
        assert (tensor == one[key]).all() == (".layers.0." in key)
    sizes = [(folder / name).stat() for folder in (whole, first)]
    assert sizes[0].st_size == sizes[1].st_size
    assert sizes[1].st_blocks <= 0.6 * sizes[0].st_blocks  # in whole blocks of the file system
    read_adapter(first, geometry, max_rank=64)
    assert make("dummy:rank=64,seed=7,layers=2") not in (whole, first)


def test_many_dummies_are_made_before_any_is_read(base: Path, tmp_path: Path) -> None:
    """Each once; folders are left alone, and a wrong one is told by whoever reads it."""
    geometry = read_geometry(base)
    wrong = "dummy:rank=0"
    specs = [*(f"dummy:rank=2,seed={seed}" for seed in range(5)), "dummy:rank=2,seed=0", wrong, "x"]
    make_dummies(specs, geometry, tmp_path)
    assert len(os.listdir(tmp_path)) == 5
    made = {
        resolve_source(spec, relative_to=tmp_path, geometry=geometry, cache=tmp_path)
        for spec in specs[:6]
    }
    assert {path.name for path in made} == set(os.listdir(tmp_path))
    with pytest.raises(AdapterError, match="rank"):
        resolve_source(wrong, relative_to=tmp_path, geometry=geometry, cache=tmp_path)


def test_dummy_parts_are_optional() -> None:
    """Everything has a default."""
    spec = parse_spec("")
    assert (spec.rank, spec.alpha, spec.targets, spec.seed) == (16, 32, SEVEN, 0)
    assert parse_spec("targets=attention").targets == SEVEN[:4]
    assert parse_spec("targets=up_proj+q_proj").targets == ("q_proj", "up_proj")


def test_dummy_without_cache_is_a_bug(tmp_path: Path) -> None:
    """A caller that cannot make dummies finds out in its own test."""
    with pytest.raises(ValueError, match="needs a geometry"):
        resolve_source("dummy:", relative_to=tmp_path)


# ---------------------------------------------------------------- A-SEC-01


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two allowed roots, a secret beside them, and links out of and between them."""
    one, two, secret = tmp_path / "one", tmp_path / "two", tmp_path / "secret"
    for folder in (one / "a", one / "b" / "c", two / "d", secret):
        write_good(folder)
    (one / "out").symlink_to(secret)
    (one / "etc").symlink_to("/etc")
    (one / "over").symlink_to(two / "d")
    (one / "loop").symlink_to("loop")
    (one / "chain").symlink_to("out")
    (tmp_path / "one-more").mkdir()
    (tmp_path / "linked").symlink_to(two)
    return [one, tmp_path / "linked"]


def test_a_sec_01_allowed(roots: list[Path]) -> None:
    """A-SEC-01: real folders below a root, absolute or relative, links between roots included."""
    one, two = roots[0], roots[1].resolve()
    for text, expected in {
        str(one / "a"): one / "a",
        f"{one}/b/../a/": one / "a",
        f"{one}//b/./c": one / "b" / "c",
        "b/c": one / "b" / "c",
        "d": two / "d",
        str(roots[1] / "d"): two / "d",
        str(two / "d"): two / "d",
        str(one / "over"): two / "d",
        str(one / "not-there"): one / "not-there",
        "a ": one / "a ",
        "a.": one / "a.",
        "%2e%2e/secret": one / "%2e%2e" / "secret",
        "A": one / "A",
    }.items():
        assert allowed_folder(text, roots) == expected


def test_a_relative_path_means_what_it_means_in_the_fleet_file(tmp_path: Path) -> None:
    """README's call: with `folder: ./adapters/*` in the file, ./adapters/acme is loaded."""
    beside, root = tmp_path / "fleet", tmp_path / "fleet" / "adapters"
    (root / "acme").mkdir(parents=True)
    (beside / "elsewhere").mkdir()
    expected = (root / "acme").resolve()
    for text in ("./adapters/acme", "adapters/acme", "acme", str(root / "acme")):
        assert allowed_folder(text, [root], beside) == expected
    assert allowed_folder("adapters/none", [root], beside) == root.resolve() / "none"
    for text in ("../secret", "elsewhere/../..", str(beside / "elsewhere")):
        with pytest.raises(AdapterError, match="not below a folder"):
            allowed_folder(text, [root], beside)


HOSTILE = [
    "..", "../secret", "../../etc", "a/../../secret", "./../secret", "b/c/../../../secret",
    "/", "/etc", "/etc/passwd", "//etc", "/proc/self/root/etc", "/proc/self/cwd", "/dev/zero",
    "/tmp/../etc", "out", "out/", "chain", "etc", "etc/passwd", "out/../secret", "../one-more",
    "../one/../secret", "~", "~root", "~/a", "http://h/a", "https://h/a", "file:///etc", "file:a",
    "FILE:/etc", "ftp://h", "s3://b/a", "hf://o/n", "demo:a", "dummy:rank=1", "data:,x", "gopher://h",
    "", "\0", "a\0", "a\0/../../secret", "a\n", "a\r", "a\x1b[31m", "a\u202e", "a\u2028", "a\ud800",
    "x" * 5000, "../" * 40 + "etc", "a" + "/.." * 60, "\t", "\x7f",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_sec_01_refused(roots: list[Path], text: str) -> None:
    """A-SEC-01: paths out of the roots, URLs and control characters; no file content is echoed."""
    with pytest.raises(AdapterError) as caught:
        allowed_folder(text, roots, roots[0].parent)
    assert caught.value.field == "lora_path" and str(caught.value).isprintable()
    assert "root:" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_sec_01_no_oracle(roots: list[Path], tmp_path: Path) -> None:
    """A-SEC-01: outside the roots, what exists and what does not give the same message."""
    messages = set()
    for name in ("secret", "no-such"):
        with pytest.raises(AdapterError) as caught:
            allowed_folder(str(tmp_path / name), roots)
        messages.add(str(caught.value).replace(name, "X"))
    assert len(messages) == 1


def test_a_sec_01_error_does_not_echo_files(base: Path, tmp_path: Path) -> None:
    """A-SEC-01: a folder whose config is another secret: the error shows none of its bytes."""
    folder = write_good(tmp_path / "a")
    (folder / "adapter_config.json").write_text("root:x:0:0:secret-canary\n")
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, read_geometry(base), max_rank=8)
    assert "canary" not in str(caught.value) and "root" not in str(caught.value).replace(
        "-root", ""
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "secret-canary" * 50}))
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, read_geometry(base), max_rank=8)
    assert len(str(caught.value)) < 400


def test_no_roots_no_loading(tmp_path: Path) -> None:
    """Without roots nothing may be loaded by a client."""
    with pytest.raises(AdapterError, match="not below a folder"):
        allowed_folder(str(tmp_path), [])
