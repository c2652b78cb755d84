"""Our header reader against the safetensors library: whatever we accept, it accepts, and alike."""

import json
import os
import random
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from multilora_cli.adapters.safetensors_header import (
    Limits,
    SafetensorsError,
    open_file,
    read_header,
)
from tests.adapters.adapter_oracle import aged
from tests.adapters.spoil import raw_file, split_file

# What we refuse on purpose although the library accepts it, by the reason of our error.
STRICTER = {
    "duplicate",  # the library keeps the last
    "name",  # empty, long or not printable
    "entry",  # unknown fields beside dtype, shape and data_offsets
    "shape",  # more than 8 dimensions, sizes of 2^48 and more
    "header_json",  # does not start with {
}


def good_file(path: Path, seed: int = 0) -> Path:
    """A few tensors of several dtypes, one empty, with metadata."""
    rng = np.random.default_rng(seed)
    tensors = {
        "a.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "b.weight": rng.normal(size=(2, 2, 2)).astype(np.float16),
        "c": np.arange(5, dtype=np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(1.5, np.float64),
    }
    save_file(tensors, path, metadata={"format": "pt", "note": "x" * 20})
    return aged(path)


def library_view(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What the library reads in a file of these bytes, or None where it refuses."""
    try:
        pairs = safetensors.deserialize(raw)
    except (safetensors.SafetensorError, OverflowError, ValueError):
        return None
    return {n: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for n, v in pairs}


def our_view(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The same from our reader, the bytes by pread."""
    header = read_header(path)
    with open_file(path) as file:
        return {
            name: (e.dtype, e.shape, file.read(e.offset, e.nbytes))
            for name, e in header.tensors.items()
        }


def test_agrees_on_a_good_file(tmp_path: Path) -> None:
    """Names, dtypes, shapes, bytes and metadata are the library's."""
    path = good_file(tmp_path / "x.safetensors")
    assert our_view(path) == library_view(path.read_bytes())
    assert read_header(path).metadata == {"format": "pt", "note": "x" * 20}


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """F31: a file cut at any byte is refused, by a clean error."""
    raw = good_file(tmp_path / "x.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(raw)):
        overwrite(path, raw[:size])
        with pytest.raises(SafetensorsError):
            read_header(path)


_INTERESTING = [b"0", b"-0", b"-1", b"1e3", b"9" * 20, b"null", b"true", b'""', b"[]", b"{}", b" ",
                b"\x00", b"\xff", b'"', b",", b":", b"[0,", b"]", b"}", b"\\u0000", b"\\ud800",
                b'"F32"', b'"BF16"', b'"F4"', b'"F8_E4M3"', b'"dtype"', b'"shape":[1]', b"65536",
                b'"__metadata__"', b'"a.weight"', b"NaN", b"Infinity", b"\n"]  # fmt: skip


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """One to three random edits, mostly of the header, with its length kept true or not."""
    text, data = split_file(raw)
    for _ in range(rng.randint(1, 3)):
        choice, position = rng.randrange(8), rng.randrange(len(text) + 1)
        end = position + rng.randrange(1, 6)
        if choice == 0:
            text = text[:position] + bytes([rng.randrange(256)]) + text[position + 1 :]
        elif choice == 1:
            text = text[:position] + rng.choice(_INTERESTING) + text[position:]
        elif choice == 2:
            text = text[:position] + rng.choice(_INTERESTING) + text[end:]
        elif choice == 3:
            text = text[:position] + text[end:]
        elif choice == 4:  # a digit of some number
            at = rng.choice([match.start() for match in re.finditer(rb"\d", text)] or [0])
            text = text[:at] + rng.choice([b"0", b"1", b"2", b"4", b"8", b"16"]) + text[at + 1 :]
        elif choice == 5:
            data = data[: rng.randrange(len(data) + 1)]
        elif choice == 6:
            data += bytes(rng.randrange(1, 9))
        else:
            other = rng.randrange(len(text) + 1)
            text = text[:position] + text[other : other + rng.randrange(40)] + text[position:]
    length = (
        len(text) if rng.random() < 0.9 else rng.choice([0, 1, len(text) + 1, 2**63, 2**64 - 1])
    )
    return raw_file(text, data, length)


def rewrite(raw: bytes, rng: random.Random) -> bytes:
    """A random edit that keeps the header JSON, and often its sense."""
    text, data = split_file(raw)
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry = header[name]
    choice = rng.randrange(9)
    if choice == 0:  # other order of entries
        header = dict(rng.sample(list(header.items()), len(header)))
    elif choice == 1:
        header[rng.choice(["x", "", "\x7f", "\u2028", "ü", "a" * 600, "a.weight"])] = header.pop(
            name
        )
    elif choice == 2:
        entry["dtype"] = rng.choice(["F32", "I32", "U32", "F16", "BF16", "I64", "F64", "U8", "F4"])
    elif choice == 3:
        entry["shape"] = rng.choice([[], [1, *entry["shape"]], entry["shape"][::-1], [2, 6], [3]])
    elif choice == 4:  # two tensors trade places
        other = header[rng.choice(names)]
        entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
    elif choice == 5:
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-8, -1, 1, 8])
    elif choice == 6:
        header["__metadata__"] = rng.choice([None, {}, {"a": "b"}, {"a": 1}, "x", {"a": None}])
    elif choice == 7:
        entry[rng.choice(["note", "dtype", "Shape"])] = rng.choice([1, "F32", None])
    else:
        size = rng.choice([0, 4, 8])
        header["new"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [len(data)] * 2}
        header["new"]["data_offsets"][1] += size
        data += bytes(size)
    spaced = json.dumps(header, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    return raw_file(spaced.encode() + b" " * rng.randrange(9), data)


def overwrite(path: Path, raw: bytes) -> None:
    """New bytes in the same file: opening with O_TRUNC costs 2 ms a time here."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, raw, 0)
    os.ftruncate(descriptor, len(raw))
    os.close(descriptor)
    aged(path)


def check_mutants(tmp_path: Path, count: int, seed: int) -> tuple[int, int]:
    """Compare both readers on `count` mutated files; gives how many each of them accepted."""
    rng = random.Random(seed)
    raw = good_file(tmp_path / "x.safetensors").read_bytes()
    path = tmp_path / "mutant.safetensors"
    ours = theirs = 0
    for number in range(count):
        mutant = rewrite(raw, rng) if number % 3 == 0 else mutate(raw, rng)
        overwrite(path, mutant)
        expected = library_view(mutant)
        theirs += expected is not None
        try:
            found = our_view(path)
        except SafetensorsError as error:
            if expected is not None:
                assert error.reason in STRICTER, (seed, number, error, mutant)
            continue
        ours += 1
        assert found == expected, (seed, number, mutant)
    return ours, theirs


def test_mutated_files(tmp_path: Path) -> None:
    """A seeded tenth of 100,000 mutants: no crash, nothing accepted that the library refuses."""
    seed = 20
    ours, theirs = check_mutants(tmp_path, 10_000, seed)
    print(f"seed {seed}: we accept {ours}, the library {theirs}")
    assert 1000 < ours < theirs


@pytest.mark.slow
def test_mutated_files_in_full(tmp_path: Path) -> None:
    """100,000 mutants with ten seeds."""
    for seed in range(10):
        ours, theirs = check_mutants(tmp_path, 10_000, seed)
        assert 1000 < ours < theirs


def test_header_of_any_offset_alignment(tmp_path: Path) -> None:
    """Data need not be aligned in the file: a header of odd length is read all the same."""
    text, data = split_file(good_file(tmp_path / "x.safetensors").read_bytes())
    path = tmp_path / "odd.safetensors"
    for pad in range(8):
        path.write_bytes(raw_file(text.rstrip() + b" " * pad, data))
        assert our_view(aged(path)) == library_view(path.read_bytes())


def test_limits(tmp_path: Path) -> None:
    """Every limit is checked before the bytes it is about are read."""
    path = good_file(tmp_path / "x.safetensors")
    size = path.stat().st_size
    read_header(path, Limits(header_bytes=4096, tensors=5, file_bytes=size))
    read_header(path, Limits(file_bytes=None))
    for limits, word in (
        (Limits(header_bytes=100), "the limit is 100"),
        (Limits(tensors=4), "5 tensors, the limit is 4"),
        (Limits(file_bytes=size - 1), f"the limit is {size - 1}"),
    ):
        with pytest.raises(SafetensorsError, match=word):
            read_header(path, limits)


def test_a_large_base_shard_is_read_when_asked(tmp_path: Path) -> None:
    """The base's loader has no file limit: 6 GB of a sparse shard cost nothing to check."""
    path = tmp_path / "shard.safetensors"
    size = 6 * 10**9
    entry = {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    text = json.dumps(entry).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    with pytest.raises(SafetensorsError, match="limit"):
        read_header(aged(path))
    assert read_header(path, Limits(file_bytes=None)).tensors["w"].nbytes == size


def test_symlinks_only_when_asked(tmp_path: Path) -> None:
    """The Hub's cache links to blobs: followed for a base, refused for an adapter."""
    path = good_file(tmp_path / "blob")
    link = tmp_path / "x.safetensors"
    link.symlink_to(path)
    with pytest.raises(SafetensorsError, match="symlink"):
        read_header(link)
    assert (
        read_header(link, follow_symlinks=True).tensors.keys() == read_header(path).tensors.keys()
    )


def test_reading_past_a_truncation_is_an_error(tmp_path: Path) -> None:
    """F31: a file that shrinks after it was opened: a clean error, never SIGBUS, never zeros."""
    path = good_file(tmp_path / "x.safetensors")
    header = read_header(path)
    entry = header.tensors["c"]
    with open_file(path) as file:
        os.truncate(path, entry.offset + 8)
        with pytest.raises(SafetensorsError, match="ends at byte"):
            file.read(entry.offset, entry.nbytes)
        with pytest.raises(SafetensorsError, match="changed while it was read"):
            file.check_unchanged()


def test_a_fresh_file_is_waited_for(tmp_path: Path) -> None:
    """A write in the same clock tick as the read keeps its mtime: young files settle first."""
    path = good_file(tmp_path / "x.safetensors")
    raw = path.read_bytes()
    path.write_bytes(raw)
    with open_file(path) as file:
        assert file.identity.mtime_ns + 19_000_000 <= os.times().elapsed * 10**12
        path.write_bytes(raw)
        with pytest.raises(SafetensorsError, match="changed"):
            file.check_unchanged()


def test_a_read_of_several_parts_goes_on_where_the_system_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a part, at the end of one, over several at once; empty parts take nothing."""
    data = bytes(range(256)) * 4
    (tmp_path / "file").write_bytes(data)
    whole, calls = os.preadv, []

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = [1, 100, 299, 7][len(calls) % 4]
        calls.append(offset)
        cut = []
        for buffer in buffers:
            cut.append(buffer[: max(limit - sum(map(len, cut)), 0)])
        return whole(descriptor, cut, offset)

    monkeypatch.setattr(os, "preadv", short)
    sizes = [100, 0, 1, 299, 300, 5, 0]
    parts = [bytearray(size) for size in sizes]
    with open_file(tmp_path / "file") as file:
        file.read_into(10, *map(memoryview, parts))
        assert b"".join(parts) == data[10 : 10 + sum(sizes)] and len(calls) > 4
        with pytest.raises(SafetensorsError, match="ends at byte 1,024"):
            file.read_into(1000, memoryview(bytearray(20)), memoryview(bytearray(20)))
