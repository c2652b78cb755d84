"""Fleet files: what is accepted, and that every mistake is one line with its place."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import (
    find_fleet,
    fleet_json_schema,
    load_fleet,
    resolve_secret,
)
from multilora_cli.fleet.schema import PATTERNS, Adapter, AdapterFolder, AdapterPattern

GOOD = """\
base:
  model: ./base
  name: demo
memory: {device_bytes: 22GiB, host_adapters: 500 MB}
adapters:
  - {name: acme/legal, source: ./a, pin: hot, ttl: 1h, priority: 3}
  - folder: ./adapters/*
  - pattern: "{tenant}/{name}"
    source: s3://adapters/{tenant}/{name}/
server: {port: 9000, api_keys: [env:KEY]}
"""


def load(tmp_path: Path, text: str | bytes, overrides: tuple[str, ...] = ()):
    path = tmp_path / "fleet.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_fleet(path, overrides)


def test_a_whole_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    fleet = loaded.fleet
    assert fleet.base.served_name == "demo"
    assert fleet.memory.device_bytes == 22 * 2**30
    assert fleet.memory.host_adapters == 500_000_000
    kinds = [type(entry) for entry in fleet.adapters]
    assert kinds == [Adapter, AdapterFolder, AdapterPattern]
    assert next(fleet.named_adapters())[1].ttl == 3600
    assert loaded.folder == tmp_path


def test_defaults(tmp_path: Path) -> None:
    fleet = load(tmp_path, "base: {model: org/Some-8B}").fleet
    assert fleet.base.served_name == "Some-8B"
    assert (fleet.server.host, fleet.server.port) == ("127.0.0.1", 8000)
    assert fleet.limits.max_num_seqs == 256


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("server.port=0", lambda f: f.server.port == 0),
        ("base.quantization=fp8", lambda f: f.base.quantization == "fp8"),
        ("memory.device_fraction=0.5", lambda f: f.memory.device_fraction == 0.5),
        ("limits.max_loras=4", lambda f: f.limits.max_loras == 4),
        ("memory.host_adapters=1GiB", lambda f: f.memory.host_adapters == 2**30),
        ("server.api_keys=[env:A, env:B]", lambda f: f.server.api_keys == ("env:A", "env:B")),
    ],
)
def test_overrides(tmp_path: Path, override: str, read) -> None:
    assert read(load(tmp_path, GOOD, (override,)).fleet)


def test_nested_overrides(tmp_path: Path) -> None:
    """What lists and keys of a flag hold is placed at the flag, as its scalars are."""
    place = r"--set limits.weights=\{zz: 2\}: limits.weights: found 'zz'"
    with pytest.raises(FleetError, match=place):
        load(tmp_path, GOOD, ("limits.weights={zz: 2}",))
    with pytest.raises(FleetError, match=r"--set server.api_keys=\[x\]: server.api_keys"):
        load(tmp_path, GOOD, ("server.api_keys=[x]",))


@pytest.mark.parametrize("override", ["server.port", "=3", "server..port=1", "base.model.x=1"])
def test_bad_overrides(tmp_path: Path, override: str) -> None:
    with pytest.raises(FleetError, match="--set"):
        load(tmp_path, GOOD, (override,))


B = "base: {model: x}\n"
HOSTILE: list[tuple[str, str | bytes, str]] = [
    ("empty", "", ":1:1: the file is empty"),
    ("only comments", "# nothing\n", ":1:1: the file is empty"),
    ("nul", "base: \x00", "control characters are not allowed"),
    ("latin-1", b"base:\n  model: caf\xe9\n", ":2:13: not UTF-8"),
    ("utf-16", "base: {model: x}".encode("utf-16"), "not UTF-8"),
    ("tab", "base:\n\tmodel: x\n", ":2:1: found a tab"),
    ("tab at the end", "base: {model: x\n\t", ":2:1: found a tab"),
    ("a version that is a number", B + "adapters: [{name: 1.10, source: x}]\n", "in quotes"),
    (
        "a control character",
        'base: {model: "a\\e"}\n',
        "expected a text without control characters",
    ),
    ("unclosed", "base: {model: x\n", ":2:1:"),
    ("unclosed quote", 'base: {model: "x}\n', "scalar"),
    ("two documents", B + "---\nbase: {model: y}\n", ":2:1:"),
    ("laughs", "a: &a [x, x]\nb: &b [*a, *a]\n" + B, "aliases"),
    ("alias to itself", "a: &a [*a]\n" + B, "aliases"),
    ("merge bomb", "a: &a {x: 1}\nb: {<<: *a}\n" + B, "aliases"),
    ("python tag", "base: !!python/object/apply:os.system [echo]\n", ":1:7: tags"),
    ("custom tag", "base: !thing {model: x}\n", ":1:7: tags"),
    ("duplicate at top", B + B, ":2:1: key 'base' stands here and in line 1"),
    ("duplicate inside", "base:\n  model: x\n  model: y\n", ":3:3: key 'model'"),
    ("duplicate in list", B + "adapters:\n- {name: a, source: x, name: b}\n", "key 'name'"),
    ("key is a list", "? [a, b]\n: 1\n", "a key must be a plain word"),
    ("a list", "- base\n", ":1:1: found a list, expected keys"),
    ("a word", "base\n", ':1:1: found "base", expected keys'),
    ("a number", "42\n", ":1:1: found 42, expected keys"),
    ("base missing", "server: {port: 1}\n", "required key 'base' is missing"),
    ("model missing", "base: {name: x}\n", "required key 'model' is missing"),
    (
        "base is a word",
        "base: llama\n",
        ':1:1: base: found "llama", expected keys below it, such as model: ...',
    ),
    ("adapters are a word", B + "adapters: llama\n", "expected a list, such as [a, b]"),
    (
        "a device of another kind",
        B + "memory: {device: gpu}\n",
        "expected auto, cpu, cuda or cuda:N",
    ),
    ("base is null", "base:\n", "base: found null"),
    (
        "unknown top key",
        B + "adaptors: []\n",
        ":2:1: adaptors: unknown key; did you mean 'adapters'",
    ),
    ("unknown base key", "base: {model: x, quantisation: fp8}\n", "did you mean 'quantization'"),
    (
        "unknown adapter key",
        B + "adapters: [{name: a, source: x, pinned: hot}]\n",
        "did you mean 'pin'",
    ),
    ("unknown with no near key", B + "zzzzqq: 1\n", "zzzzqq: unknown key"),
    ("model empty", "base: {model: ''}\n", "base.model"),
    ("model a number", "base: {model: 8}\n", "base.model: found 8"),
    ("model with escape", 'base: {model: "a\\eb"}\n', "base.model"),
    ("model too long", "base: {model: " + "x" * 5000 + "}\n", "base.model"),
    (
        "quantization unknown",
        "base: {model: x, quantization: int3}\n",
        "'auto', 'none', 'fp8' or 'awq'",
    ),
    ("quantization no", "base: {model: x, quantization: no}\n", 'found "no"'),
    ("dtype bf16", "base: {model: x, dtype: bf16}\n", "base.dtype"),
    ("len zero", "base: {model: x, max_model_len: 0}\n", "base.max_model_len: found 0"),
    ("len octal", "base: {model: x, max_model_len: 010}\n", 'found "010"'),
    ("len hex", "base: {model: x, max_model_len: 0x800}\n", 'found "0x800"'),
    ("len sexagesimal", "base: {model: x, max_model_len: 12:30:45}\n", 'found "12:30:45"'),
    ("len float", "base: {model: x, max_model_len: 8192.0}\n", "found 8192.0"),
    ("len true", "base: {model: x, max_model_len: true}\n", "found true"),
    ("len quoted", "base: {model: x, max_model_len: '8192'}\n", 'found "8192"'),
    ("len negative", "base: {model: x, max_model_len: -1}\n", "found -1"),
    (
        "len of 5,000 digits",
        "base: {model: x, max_model_len: " + "9" * 5000 + "}\n",
        "max_model_len",
    ),
    ("date", "base: {model: x, max_model_len: 2024-01-01}\n", 'found "2024-01-01"'),
    ("fraction nan", B + "memory: {device_fraction: .nan}\n", 'found ".nan"'),
    ("fraction inf", B + "memory: {device_fraction: .inf}\n", 'found ".inf"'),
    ("fraction 1e400", B + "memory: {device_fraction: 1e400}\n", "device_fraction"),
    ("fraction zero", B + "memory: {device_fraction: 0}\n", "device_fraction"),
    ("fraction two", B + "memory: {device_fraction: 2}\n", "device_fraction: found 2"),
    ("size without unit name", B + "memory: {host_adapters: 8 foo}\n", "'8 foo' is not a size"),
    ("size negative", B + "memory: {host_adapters: -1}\n", "host_adapters: found -1"),
    ("size huge", B + "memory: {host_adapters: 9000000TiB}\n", "host_adapters"),
    ("size float", B + "memory: {host_adapters: 1.5}\n", "host_adapters: found 1.5"),
    ("device gpu", B + "memory: {device: gpu}\n", "memory.device"),
    ("reserve one", B + "memory: {kv_reserve: 1}\n", "kv_reserve"),
    ("seqs zero", B + "limits: {max_num_seqs: 0}\n", "max_num_seqs: found 0"),
    ("seqs huge", B + "limits: {max_num_seqs: 100000}\n", "max_num_seqs"),
    ("rank over", B + "limits: {max_lora_rank: 1024}\n", "max_lora_rank"),
    ("port negative", B + "server: {port: -1}\n", "server.port"),
    ("port over", B + "server: {port: 65536}\n", "server.port: found 65536"),
    ("port word", B + "server: {port: http}\n", 'found "http"'),
    ("adapters a mapping", B + "adapters: {a: b}\n", "adapters"),
    ("adapter a word", B + "adapters: [a]\n", "adapters.0"),
    ("adapter null", B + "adapters: [null]\n", "adapters.0"),
    ("adapter without source", B + "adapters: [{name: a}]\n", "required key 'source'"),
    ("adapter without name", B + "adapters: [{source: a}]\n", "required key 'name'"),
    ("name with space", B + "adapters: [{name: 'a b', source: x}]\n", "adapters.0.name"),
    ("name with dots first", B + "adapters: [{name: ../x, source: x}]\n", "adapters.0.name"),
    ("name of three parts", B + "adapters: [{name: a/b/c, source: x}]\n", "adapters.0.name"),
    ("name in another script", B + "adapters: [{name: аcme, source: x}]\n", "adapters.0.name"),
    ("name with escape", B + 'adapters: [{name: "a\\x1b[31m", source: x}]\n', "adapters.0.name"),
    ("name null", B + "adapters: [{name: null, source: x}]\n", "adapters.0.name"),
    ("name number", B + "adapters: [{name: 7, source: x}]\n", "adapters.0.name: found 7"),
    ("name twice", B + "adapters: [{name: a, source: x}, {name: a, source: y}]\n", "'a' is taken"),
    (
        "twins by case",
        B + "adapters: [{name: a, source: x}, {name: A, source: y}]\n",
        "only by case",
    ),
    ("name of the base", B + "adapters: [{name: x, source: x}]\n", "the base's name"),
    ("pin unknown", B + "adapters: [{name: a, source: x, pin: cold}]\n", "adapters.0.pin"),
    (
        "ttl without unit",
        B + "adapters: [{name: a, source: x, ttl: '1'}]\n",
        "'1' is not a duration",
    ),
    ("ttl zero", B + "adapters: [{name: a, source: x, ttl: 0s}]\n", "ttl"),
    ("digest short", B + "adapters: [{name: a, source: x, digest: sha256:ab}]\n", "digest"),
    ("folder and name", B + "adapters: [{name: a, folder: x}]\n", "adapters.0.name: unknown key"),
    ("pattern without source", B + "adapters: [{pattern: x}]\n", "required key 'source'"),
    ("inline key", B + "server: {api_keys: [sk-secret]}\n", "env:NAME or file:PATH"),
    ("keys a word", B + "server: {api_keys: env:X}\n", "server.api_keys"),
    ("deep", "base: " + "[" * 40 + "]" * 40 + "\n", "nested deeper than 32"),
    ("very deep", "base: " + "[" * 5000 + "]" * 5000 + "\n", ""),
    ("deep maps", "base: " + "{a: " * 40 + "1" + "}" * 40 + "\n", "nested deeper than 32"),
    ("scalar over 64 KiB", "base: {model: " + "x" * 70000 + "}\n", "64 KiB"),
    ("key of 1 MB", "k" * 1_000_000 + ": 1\n", ""),
    ("over 8 MiB", "# " + "x" * (8 * 2**20) + "\n", "larger than 8 MiB"),
]


@pytest.mark.parametrize(("kind", "text", "expected"), HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_files_are_refused_with_their_place(
    tmp_path: Path, kind: str, text: str | bytes, expected: str
) -> None:
    """G20 and A-OUT-13: one line a mistake, the file named, nothing echoed at length."""
    with pytest.raises(FleetError) as caught:
        load(tmp_path, text)
    message = caught.value.message
    assert expected in message
    assert message.startswith(str(tmp_path / "fleet.yaml"))
    assert len(message) < 8192
    assert "sk-secret" not in message
    assert all(ord(char) >= 32 or char == "\n" for char in message)


def test_at_least_eighty_hostile_kinds() -> None:
    assert len({row[0] for row in HOSTILE}) >= 80


def test_every_mistake_of_a_file_is_one_line(tmp_path: Path) -> None:
    text = "base: {model: x, dtype: y}\nserver: {port: z}\nlimits: {max_loras: 0}\n"
    with pytest.raises(FleetError) as caught:
        load(tmp_path, text)
    lines = caught.value.message.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "base.dtype",
        "limits.max_loras",
        "server.port",
    ]


def test_five_thousand_adapters_parse_quickly(tmp_path: Path) -> None:
    rows = "".join(f"  - {{name: t/a{i}, source: ./a{i}}}\n" for i in range(5000))
    start = time.process_time()
    loaded = load(tmp_path, B + "adapters:\n" + rows)
    assert len(loaded.fleet.adapters) == 5000
    assert time.process_time() - start < 30  # a hang, not a speed, is what this catches


def test_missing_file_and_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FleetError, match="no fleet file"):
        find_fleet(None)
    (tmp_path / "fleet.example.yaml").write_text(B)
    assert load_fleet().path.name == "fleet.example.yaml"
    with pytest.raises(FleetError, match="no such fleet file"):
        load_fleet(tmp_path / "nope.yaml")


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLORA_TEST_KEY", "k1")
    (tmp_path / "key").write_text("k2\n")
    (tmp_path / "empty").write_text("\n")
    assert resolve_secret("env:MLORA_TEST_KEY", tmp_path) == "k1"
    assert resolve_secret("file:key", tmp_path) == "k2"
    for reference in ("env:MLORA_TEST_UNSET", "file:missing", "file:empty"):
        with pytest.raises(FleetError):
            resolve_secret(reference, tmp_path)


def test_every_pattern_of_the_schema_has_words() -> None:
    """A value that does not match one is told in them."""

    def patterns(part: object) -> Iterator[str]:
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for each in parts:
            yield from patterns(each)
        if isinstance(part, dict) and isinstance(part.get("pattern"), str):
            yield part["pattern"]

    found = set(patterns(json.loads(fleet_json_schema())))
    assert found == set(PATTERNS)


def test_schema_is_json_and_names_every_key() -> None:
    schema = json.loads(fleet_json_schema())
    assert set(schema["properties"]) >= {"base", "memory", "limits", "adapters", "server"}


def test_a_digest_of_a_folder_goes_with_no_text_of_its_own(tmp_path: Path) -> None:
    """A folder's digest covers config and weights; a remote copy's covers all its files."""
    digest = f"digest: 'sha256:{'0' * 64}'"
    right = (
        "adapters:\n"
        "- {name: a, source: ./a, tokenizer: adapter}\n"
        f"- {{name: b, source: hf://a/b, tokenizer: adapter, {digest}}}\n"
        f"- {{name: d, source: ./d, {digest}}}\n"
    )
    load(tmp_path, B + right)
    with pytest.raises(FleetError) as caught:
        load(
            tmp_path, B + right + f"- {{name: c, source: ./c, chat_template: adapter, {digest}}}\n"
        )
    assert caught.value.message.endswith(
        "adapters.3.digest: of a folder it covers no tokenizer or chat template; leave one of them"
        " out"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("server.port=eight", '--set server.port=eight: server.port: found "eight"'),
        ("server.prot=1", "--set server.prot=1: server.prot: unknown key; did you mean 'port'?"),
        ("memory.device_bytes=1XB", "--set memory.device_bytes=1XB: memory.device_bytes: "),
    ],
)
def test_a_mistake_of_a_flag_is_placed_there_not_in_the_file(
    tmp_path: Path, override: str, said: str
) -> None:
    """It was told at the line where the file holds another, correct value."""
    with pytest.raises(FleetError) as caught:
        load(tmp_path, GOOD, (override,))
    assert caught.value.message.startswith(said)
    with pytest.raises(FleetError) as caught:  # a mistake of the file stays the file's
        load(tmp_path, GOOD.replace("9000", "nine"), ("base.name=other",))
    assert "fleet.yaml:10:10: server.port" in caught.value.message


def test_a_folder_is_no_fleet_file_and_the_hint_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="a folder, expected a fleet file") as caught:
        load_fleet(tmp_path)
    assert "README.md" in str(caught.value.hint)
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(FleetError) as caught:
        load_fleet(tmp_path)
    assert caught.value.hint == f"there is {tmp_path / 'mine.yaml'}"
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(FleetError) as caught:
        load_fleet(tmp_path)
    assert (
        caught.value.hint == f"this is an adapter: mlora verify {tmp_path} --base MODEL checks it"
    )
