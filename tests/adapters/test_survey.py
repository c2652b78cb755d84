"""What is remembered of adapters is what reading them says, and never an acceptance too much."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.peft import AdapterFile
from multilora_cli.adapters.survey import Survey, Surveyor
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters.adapter_oracle import copy_of, edit_config, read
from tests.adapters.malformed import KINDS
from tests.adapters.spoil import WEIGHTS, header_text, write_good

MAX_RANK = 64


@dataclass
class Reads:
    """How often adapters were taken apart."""

    count: int = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts full reads."""
    found = Reads()
    whole = Surveyor._read

    def spy(self: Surveyor, folder: Path) -> AdapterFile:
        found.count += 1
        return whole(self, folder)

    monkeypatch.setattr(Surveyor, "_read", spy)
    return found


def surveyor(base: Path, memory: Path | None = None, **options: Any) -> Surveyor:
    """As a start makes it."""
    options = {"max_rank": MAX_RANK, "base_folder": base, **options}
    return Surveyor(read_geometry(base), memory=memory, **options)


def assert_equals_read(survey: Survey, base: Path, folder: Path) -> None:
    """Everything that is told of the adapter."""
    adapter = read(folder, base, max_rank=MAX_RANK)
    shape = survey.shape
    assert (survey.folder, survey.files) == (adapter.folder, adapter.files)
    assert shape.ranks == adapter.ranks and shape.num_bound == len(adapter.weights)
    assert (shape.max_rank, shape.modules) == (adapter.max_rank, adapter.modules)
    assert shape.num_weights == adapter.num_weights
    assert (shape.base_model_name, shape.notes) == (adapter.base_model_name, adapter.notes)


def test_one_shape_is_taken_apart_once(
    base: Path, seven: Path, attention: Path, tmp_path: Path, reads: Reads
) -> None:
    folders = [copy_of((seven, attention)[i % 2], tmp_path / f"a{i}") for i in range(10)]
    other = edit_config(copy_of(seven, tmp_path / "other"), lora_alpha=3)
    found = surveyor(base)
    for folder in (*folders, other):
        assert_equals_read(found.survey(folder), base, folder)
    assert reads.count == 3


def test_the_next_start_opens_no_adapter(
    base: Path, seven: Path, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [copy_of(seven, tmp_path / f"a{i}") for i in range(5)]
    first = surveyor(base, tmp_path / "memory")
    before = [first.survey(folder) for folder in folders]
    first.save()
    second = surveyor(base, tmp_path / "memory")
    with monkeypatch.context() as patch:
        patch.setattr("multilora_cli.adapters.survey.open_file", None)
        assert [second.survey(folder) for folder in folders] == before
    assert reads.count == 1
    second.save()
    # Another base, or another limit, asks again; so does an unreadable memory.
    for other in (
        surveyor(base, tmp_path / "memory", max_rank=8),
        surveyor(base, tmp_path / "memory", base_folder=None),
    ):
        other.survey(folders[0])
    assert reads.count == 3
    for file in (tmp_path / "memory").iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    assert surveyor(base, tmp_path / "memory").survey(folders[0]) == before[0]
    assert reads.count == 4


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
def test_a_file_that_changed_is_looked_at_again(
    base: Path, seven: Path, tmp_path: Path, name: str
) -> None:
    """Same size, same name, the old time put back: the change time tells."""
    folder = copy_of(seven, tmp_path / "a")
    found = surveyor(base, tmp_path / "memory")
    before = found.survey(folder)
    found.save()
    status = (folder / name).stat()
    raw = (folder / name).read_bytes()
    spoiled = raw.replace(b"F32", b"F3x") if name == WEIGHTS else raw.replace(b"LORA", b"LoRA")
    assert len(spoiled) == len(raw) and spoiled != raw
    (folder / name).write_bytes(spoiled)
    os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    for again in (found, surveyor(base, tmp_path / "memory")):
        with pytest.raises(AdapterError, match=r"dtype|peft_type"):
            again.survey(folder)
    (folder / name).write_bytes(raw)
    assert found.survey(folder).shape == before.shape


def test_free_text_in_the_header_makes_no_new_shape(
    base: Path, tmp_path: Path, reads: Reads
) -> None:
    found = surveyor(base)
    for index in range(6):
        folder = write_good(tmp_path / f"a{index}")
        text = json.dumps({"format": "pt", "run": f"run {'x' * index}"}).encode()
        _set_metadata(folder, text)
        assert_equals_read(found.survey(folder), base, folder)
    assert reads.count == 1


@pytest.mark.parametrize(
    "metadata",
    [b'{"step":3}', b'{"a":"b","a":"c"}', b'{"a":"b"', b'{"a":["b"]}', b'{"a":"\\ud800"}'],
)
def test_free_text_that_is_none_is_refused_beside_a_good_one(
    base: Path, tmp_path: Path, metadata: bytes
) -> None:
    found = surveyor(base)
    good = write_good(tmp_path / "good")
    _set_metadata(good, b'{"format":"pt"}')
    found.survey(good)
    bad = write_good(tmp_path / "bad")
    _set_metadata(bad, metadata)
    with pytest.raises(AdapterError) as expected:
        read(bad, base, max_rank=MAX_RANK)
    with pytest.raises(AdapterError) as caught:
        found.survey(bad)
    assert caught.value.message == expected.value.message


def test_metadata_twice_is_refused_whatever_was_seen(base: Path, tmp_path: Path) -> None:
    found = surveyor(base)
    for key in (b"__metadata__", b"\\u005f_metadata__"):
        one = write_good(tmp_path / f"one{len(key)}")
        _set_metadata(one, b'{"format":"pt"}', key)
        found.survey(one)
        two = write_good(tmp_path / f"two{len(key)}")
        _set_metadata(two, b'{"format":"pt"},"' + key + b'":{"format":"pt"}')
        with pytest.raises(AdapterError, match="twice"):
            found.survey(two)


@pytest.mark.parametrize("name", KINDS)
def test_malformed_adapters_are_refused_as_ever(base: Path, tmp_path: Path, name: str) -> None:
    """By a surveyor that knows the good form of the same adapter, in the same folder."""
    found = surveyor(base, tmp_path / "memory")
    folder = write_good(tmp_path / "acme")
    found.survey(folder)
    found.save()
    found = surveyor(base, tmp_path / "memory")
    kind = KINDS[name]
    kind.build(folder)
    try:
        read(folder, base, max_rank=MAX_RANK)
    except AdapterError as error:
        with pytest.raises(AdapterError) as caught:
            found.survey(folder)
        assert (caught.value.message, caught.value.reason) == (error.message, error.reason)
    else:
        assert kind.when == "values", "not refused"
        assert_equals_read(found.survey(folder), base, folder)


def test_a_folder_with_more_in_it_is_read_as_ever(base: Path, tmp_path: Path) -> None:
    """Its notes and errors depend on what else lies there."""
    found = surveyor(base)
    folder = write_good(tmp_path / "a")
    assert found.survey(folder).shape.notes == read(folder, base).notes
    (folder / "adapter_model.bin").write_bytes(b"x")
    assert any("ignored" in note for note in found.survey(folder).shape.notes)
    inner = tmp_path / "named"
    write_good(inner / "default")
    assert_equals_read(found.survey(inner), base, inner)


def test_what_trainers_leave_beside_an_adapter_costs_nothing(
    base: Path, tmp_path: Path, reads: Reads
) -> None:
    found = surveyor(base)
    for index in range(3):
        folder = write_good(tmp_path / f"a{index}")
        for name in ("training_args.bin", "README.md", "optimizer.pt", "tokenizer.json"):
            (folder / name).write_bytes(b"x")
        (folder / "checkpoint-10").mkdir()
        assert_equals_read(found.survey(folder), base, folder)
    assert reads.count == 1


def test_a_memory_that_cannot_be_written_is_no_failure(base: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    found = surveyor(base, blocked / "memory")
    found.survey(write_good(tmp_path / "a"))
    found.save()


def _set_metadata(folder: Path, text: bytes, key: bytes = b"__metadata__") -> None:
    """Put it first in the header, in place of what is there."""

    def edit(header: bytes) -> bytes:
        fields = json.loads(header)
        fields.pop("__metadata__", None)
        rest = json.dumps(fields, separators=(",", ":")).encode()[1:]
        return b'{"' + key + b'":' + text + b"," + rest

    header_text(edit)(folder)
