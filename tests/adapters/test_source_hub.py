"""hf:// sources against a hub on loopback, well-behaved and not (RELIABILITY F60 to F70)."""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.adapters.source import resolve_source
from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.source.fetch import FetchLimits
from multilora_cli.adapters.source.hub import open_hub, parse_hub
from multilora_cli.adapters.source.remote import Fetched, RemoteSource
from multilora_cli.adapters.store import DiskStore
from multilora_cli.errors import AdapterError, AdapterUnavailable, MloraError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters import fault_origin as faults
from tests.adapters.fault_origin import FaultOrigin
from tests.adapters.spoil import CONFIG, WEIGHTS, write_good

LIMITS = FetchLimits(
    connect_s=5.0, stall_s=10.0, floor_bytes_per_s=1000, tries=3, backoff_s=0.01, total_s=30.0,
    down_s=60.0,
)  # fmt: skip
IMPATIENT = replace(LIMITS, connect_s=0.5, stall_s=0.5)
TOKEN = "hf_canaryCanaryCanary"
SPEC = "//acme/legal"


class Hub:
    """A hub, a store, and a source between them."""

    def __init__(self, origin: FaultOrigin, folder: Path) -> None:
        self.origin = origin
        self.folder = folder
        self.published = write_good(folder / "published")
        self.commit = origin.put_repository("acme/legal", self.published)
        self.store = DiskStore(folder / "store", 2**30)
        self.source = RemoteSource(parse_hub, open_hub, LIMITS)

    def fetch(self, text: str = SPEC, digest: str | None = None) -> Fetched:
        """`text` into the store."""
        return self.source.fetch(text, SourceContext(self.folder, store=self.store, digest=digest))

    def refused(self, text: str = SPEC, digest: str | None = None) -> str:
        """What is said when `text` cannot be had; nothing is left, and no key is told."""
        before = sorted(os.listdir(self.store.root / "entries"))
        with pytest.raises(MloraError) as caught:
            self.fetch(text, digest)
        assert sorted(os.listdir(self.store.root / "entries")) == before
        assert os.listdir(self.store.root / "partial") == []
        self.store.check_integrity()
        message = f"{caught.value.message} {caught.value.hint}"
        assert message.isprintable() and TOKEN not in message and len(message) < 600
        assert "hf://acme/legal@" in message and "127.0.0.1" in message
        return message

    def again(self) -> None:
        """A new process on the same store, which knows of no outage."""
        self.store.close()
        self.store = DiskStore(self.store.root, 2**30)
        self.source = RemoteSource(parse_hub, open_hub, LIMITS)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """acme/legal on a hub of its own, the token in the environment."""
    with faults.fault_origin() as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub = Hub(origin, tmp_path)
        yield hub
        hub.store.close()


def test_fetched_as_published(hub: Hub, base: Path) -> None:
    """Same bytes, same digest as the folder itself; the commit is recorded; the token is sent."""
    fetched = hub.fetch()
    geometry = read_geometry(base)
    expected = content_digest(read_adapter(hub.published, geometry, max_rank=8))
    assert fetched.digest == expected == fetched.folder.name
    assert content_digest(read_adapter(fetched.folder, geometry, max_rank=8)) == expected
    assert (fetched.revision, fetched.stale) == (hub.commit, False)
    assert all(s.headers["Authorization"] == f"Bearer {TOKEN}" for s in hub.origin.seen)
    assert oct(fetched.folder.stat().st_mode)[-3:] == "700"
    assert oct((fetched.folder / WEIGHTS).stat().st_mode)[-3:] == "600"
    text = "".join(p.read_text() for p in (hub.store.root / "refs").iterdir())
    assert TOKEN not in text + (fetched.folder / "manifest.json").read_text()


def test_resolve_source_reaches_the_hub(hub: Hub) -> None:
    """The scheme is wired in; without a store it is refused in words."""
    folder = resolve_source("hf://acme/legal", relative_to=hub.folder, store=hub.store)
    assert folder == hub.fetch().folder
    with pytest.raises(AdapterError, match="no disk cache"):
        resolve_source("hf://acme/legal", relative_to=hub.folder)


def test_nothing_is_fetched_twice(hub: Hub) -> None:
    """An unchanged branch costs two questions, a commit or an expected digest costs none."""
    first = hub.fetch()
    assert hub.origin.count("/resolve/") == 2
    hub.again()
    assert hub.fetch() == first and hub.origin.count("/resolve/") == 2
    assert hub.fetch(f"{SPEC}@{hub.commit}").digest == first.digest
    hub.origin.seen.clear()
    assert hub.fetch(f"{SPEC}@{hub.commit}").digest == first.digest
    assert hub.fetch(digest=first.digest).digest == first.digest
    assert hub.origin.seen == []


def test_revisions(hub: Hub) -> None:
    """Branches, commits and pull requests; a commit that answers as another is refused."""
    for revision in ("main", "refs/pr/1", hub.commit):
        assert hub.fetch(f"{SPEC}@{revision}").revision == hub.commit
    assert "no repository acme/legal with a revision v9" in hub.refused(f"{SPEC}@v9")
    other = {"sha": "b" * 40}
    hub.origin.always["/revision/"] = faults.status(200, json.dumps(other).encode())
    assert "when asked for" in hub.refused(f"{SPEC}@{'c' * 40}")
    hub.origin.always["/revision/"] = faults.status(200, b'{"sha": "../../x"}')
    assert "no commit" in hub.refused(f"{SPEC}@v1")


def test_shards(hub: Hub, tmp_path: Path) -> None:
    """An index and the shards it names; one that is not there, or a hostile name, is refused."""
    sharded = tmp_path / "sharded"
    shutil.copytree(hub.published, sharded)
    one, two = (f"adapter_model-0000{n}-of-00002.safetensors" for n in (1, 2))
    (sharded / WEIGHTS).rename(sharded / one)
    shutil.copy(sharded / one, sharded / two)
    index = sharded / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": one, "b": two}}))
    (sharded / "adapter_model-00003-of-00003.safetensors").write_bytes(b"not named")
    hub.origin.put_repository("acme/legal", sharded)
    fetched = hub.fetch()
    assert {p.name for p in fetched.folder.iterdir()} == {
        CONFIG, one, two, index.name, "manifest.json"
    }  # fmt: skip
    hub.again()
    assert hub.fetch() == fetched
    for name, words in (("../../x", "expected names of shards"), (two.replace("2-", "3-"), two)):
        index.write_text(json.dumps({"weight_map": {"a": one, "b": name}}))
        hub.origin.put_repository("acme/legal", sharded)
        assert words.replace("2-", "3-") in hub.refused()


@pytest.mark.parametrize(
    "spec",
    ["hf:acme/legal", "hf://acme", "hf://a/b/c", "hf://../x", "hf://a/..", "hf://a/b@", "hf://a/b@..",
     "hf://a/b@v1/../../x", "hf://-a/b", "hf://a/b?x=1", "hf://a/b#x", "hf://a/b@m\n", "hf://u:p@h/b",
     "hf://a/b@" + "x" * 200, "hf://", "hf://a b/c"],
)  # fmt: skip
def test_spellings_refused(spec: str, tmp_path: Path) -> None:
    """What is no repository is refused before anything is asked."""
    if spec == "hf://a/b@":
        assert parse_hub(spec[3:]).spec == "hf://a/b@main"
        return
    with pytest.raises(AdapterError, match="expected hf://org/name"):
        parse_hub(spec[3:])


# ---------------------------------------------------------------- F60 to F63


@pytest.mark.parametrize("part", ["/revision/", "/paths-info/", WEIGHTS])
@pytest.mark.parametrize("fault", [faults.reset, faults.status(503), faults.status(500)])
def test_f60_f61_one_failure_is_tried_again(hub: Hub, part: str, fault: faults.Fault) -> None:
    """F60, F61: a reset or 5xx at any of the three requests, then it goes well."""
    hub.origin.faults[part] = [fault, fault]
    assert hub.fetch().revision == hub.commit
    assert hub.origin.count(part) == 3


def test_f60_nobody_listens(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """F60: a refused connection names origin and adapter; the next adapter is told at once."""
    hub.origin.url = "http://127.0.0.1:1"
    monkeypatch.setenv("HF_ENDPOINT", hub.origin.url)
    assert "no connection" in hub.refused()
    tries: list[float] = []
    monkeypatch.setattr("time.sleep", tries.append)
    assert "no connection" in hub.refused(f"{SPEC}@other")
    assert tries == []


def test_f60_dns_and_tls(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """F60: an unknown host, and TLS spoken to a server that has none."""
    monkeypatch.setenv("HF_ENDPOINT", hub.origin.url.replace("http:", "https:"))
    assert "no connection" in hub.refused() or "broke off" in hub.refused()
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(AdapterUnavailable, match=r"no-such-host\.invalid: no connection"):
        RemoteSource(parse_hub, open_hub, LIMITS).fetch(
            SPEC, SourceContext(hub.folder, store=hub.store)
        )


def test_f61_429(hub: Hub) -> None:
    """F61: too many requests; the last answer is what is told. Another adapter is not held up."""
    hub.origin.always["/acme/legal/"] = faults.status(429, retry_after="0")
    hub.origin.put_repository("acme/other", hub.published)
    assert "HTTP 429" in hub.refused() and hub.origin.count("legal") == LIMITS.tries
    assert hub.fetch("//acme/other").digest


@pytest.mark.parametrize("code", [401, 403])
def test_f62_no_access(
    hub: Hub, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """F62: asked once; the message names the variable that holds the token."""
    hub.origin.always["/revision/"] = faults.status(code, b"<Key>canary</Key>")
    message = hub.refused()
    assert f"HTTP {code}" in message and "HF_TOKEN may read" in message and "canary<" not in message
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    message = hub.refused()
    assert "set HF_TOKEN" in message and len(hub.origin.seen) == 2
    assert "Authorization" not in hub.origin.seen[1].headers


def test_f62_access_taken_away_is_not_an_outage(hub: Hub) -> None:
    """F62: a copy is not served once the origin says no."""
    hub.fetch()
    for code in (401, 403, 404):
        hub.origin.always["/revision/"] = faults.status(code)
        assert f"HTTP {code}" in hub.refused()


@pytest.mark.parametrize("fault", [faults.stall, faults.drip, faults.drip_head])
def test_f63_slow(hub: Hub, fault: faults.Fault) -> None:
    """F63: a drip, a stall, a head that never ends: given up, the slot is free again."""
    hub.source = RemoteSource(parse_hub, open_hub, replace(IMPATIENT, tries=1))
    hub.origin.always[WEIGHTS] = fault
    assert re.search("too slow|sends nothing|broke off", hub.refused())
    hub.origin.always.clear()
    hub.source._limits = LIMITS
    for _ in range(9):  # one more than there are slots
        assert hub.fetch().digest


# ---------------------------------------------------------------- F64 to F68


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.short, "broke off"),
        (faults.long, "more than the expected"),
        (faults.wrong_length, "bytes, expected"),
        (faults.gzip_bomb, "bytes, expected|content-encoding"),
        (faults.status(206, b"x"), "HTTP 206"),
    ],
)
def test_f64_wrong_bodies(hub: Hub, fault: faults.Fault, words: str) -> None:
    """F64: refused, nothing left; the same once only is tried again."""
    hub.origin.always[WEIGHTS] = fault
    assert re.search(words, hub.refused())
    hub.origin.always.clear()
    hub.origin.faults[WEIGHTS] = [fault]
    if fault is not faults.gzip_bomb:
        assert hub.fetch().revision == hub.commit


def test_f64_answers_without_end(hub: Hub) -> None:
    """F64, F68: 100,000 files told, a gzip bomb in place of JSON, garbage."""
    hub.origin.extra_items = [faults.describe(f"x{n}", b"") for n in range(100_000)]
    assert "more than 1,048,576 bytes" in hub.refused()
    hub.origin.extra_items = []
    hub.origin.always["/paths-info/"] = faults.gzip_bomb
    assert "content-encoding" in hub.refused()
    for body in (b"{}", b"[" * 100_000, b"\xff", b"null", b'"x"'):
        hub.origin.always["/paths-info/"] = faults.status(200, body)
        assert hub.refused()


def test_f65_wrong_bytes(hub: Hub) -> None:
    """F65: fetched twice, then refused naming file, found and expected; once only is mended."""
    hub.origin.always[WEIGHTS] = faults.flipped
    message = hub.refused()
    assert WEIGHTS in message and re.search(r"found [0-9a-f]{64}, expected [0-9a-f]{64}", message)
    assert hub.origin.count(WEIGHTS) == 2
    hub.origin.always.clear()
    hub.origin.faults[WEIGHTS] = [faults.flipped]
    assert hub.fetch().revision == hub.commit


def test_f65_another_digest_than_expected(hub: Hub) -> None:
    """F65: the fleet's digest decides, also where the hub agrees with itself."""
    message = hub.refused(digest="0" * 64)
    assert f"expected sha256:{'0' * 64}" in message and hub.origin.count(WEIGHTS) == 2


def test_f65_recorded_digest_is_enforced(hub: Hub) -> None:
    """F65: the config has no digest at the hub: the one of the first fetch holds for its commit."""
    first = hub.fetch()
    shutil.rmtree(first.folder)
    hub.again()
    hub.origin.always[CONFIG] = faults.flipped
    assert f"expected sha256:{first.digest}" in hub.refused()


def test_f66_one_commit(hub: Hub, tmp_path: Path) -> None:
    """F66, F70: the branch moves between look-up and read: nothing of two commits is blended."""
    other = write_good(tmp_path / "other", seed=7)

    def move(handler: faults.Handler, body: bytes) -> None:
        handler.answer(200, body)
        hub.origin.put_repository("acme/legal", other)

    hub.origin.faults["/paths-info/"] = [move]
    assert "HTTP 404" in hub.refused()  # the old commit is gone, its files with it
    fetched = hub.fetch()
    assert (fetched.folder / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


def test_f67_redirects(hub: Hub) -> None:
    """F67: another port, a metadata address, a loop, a downgrade, a file: never asked."""
    with faults.fault_origin() as other:
        for url in (
            f"{other.url}/x", "http://169.254.169.254/latest/", "file:///etc/passwd",
            "//evil.test/x", "http://huggingface.co/x", "https://huggingface.co:444/x", "https://nothf.co/x",
            "http://[",
            "https://huggingface.co.evil.test/x", "",
        ):  # fmt: skip
            hub.origin.always[WEIGHTS] = faults.redirect(url)
            assert re.search("redirect", hub.refused()), url
            hub.source = RemoteSource(parse_hub, open_hub, LIMITS)
        assert other.seen == []
    before = len(hub.origin.seen)
    hub.origin.always[WEIGHTS] = faults.redirect(f"{hub.origin.url}/{WEIGHTS}")
    assert "more than 5 redirects" in hub.refused()
    assert len(hub.origin.seen) - before < 12


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]"])
def test_f67_metadata_endpoint(hub: Hub, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F67: not even where it is the endpoint itself."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
    with pytest.raises(AdapterError, match="link-local or metadata"):
        hub.fetch()


def test_f68_hostile_names(hub: Hub) -> None:
    """F68: what was not asked for is not looked at, whatever it is called."""
    body = b"x" * 10
    hub.origin.extra_items = [
        faults.describe(name, body)
        for name in ("../../etc/x", "/etc/passwd", "a/adapter_config.json", "", "x\0", "evil.py")
    ] + [{"type": "directory", "path": CONFIG}, "x", None]
    fetched = hub.fetch()
    assert {p.name for p in fetched.folder.iterdir()} == {CONFIG, WEIGHTS, "manifest.json"}
    assert hub.origin.count("/resolve/") == 2


@pytest.mark.parametrize(
    "item",
    [{"type": "file", "path": CONFIG, "size": -1, "oid": "a" * 40},
     {"type": "file", "path": CONFIG, "size": "9", "oid": "a" * 40},
     {"type": "file", "path": CONFIG, "size": True, "oid": "a" * 40},
     {"type": "file", "path": CONFIG, "size": 9, "oid": 5},
     {"type": "file", "path": CONFIG, "size": 9, "oid": "a" * 40, "lfs": {"oid": "x"}},
     {"type": "file", "path": CONFIG, "size": 2**40, "oid": "a" * 40}],
    ids=str,
)  # fmt: skip
def test_f68_hostile_descriptions(hub: Hub, item: dict[str, object]) -> None:
    """F64, F68: sizes and ids that are none, and a size beyond the limit."""
    hub.origin.extra_items = [item]
    assert CONFIG in hub.refused() and hub.origin.count("/resolve/") == 0


def test_what_is_no_adapter(hub: Hub, tmp_path: Path) -> None:
    """Neither config nor weights, or a pickle only: told without fetching."""
    for files, words in (
        ({}, f"no {CONFIG}"),
        ({CONFIG: "{}"}, "no weights"),
        ({CONFIG: "{}", "adapter_model.bin": "x"}, "a pickle can run code"),
    ):
        folder = tmp_path / words.replace(" ", "-")
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        hub.origin.put_repository("acme/legal", folder)
        assert words in hub.refused() and hub.origin.count("/resolve/") == 0


# ---------------------------------------------------------------- F69, F70


def test_f69_origin_down(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """F69: served from the store and marked stale, until the origin is back."""
    fetched = hub.fetch()
    hub.again()
    hub.origin.always["/"] = faults.status(503)
    stale = hub.fetch()
    assert stale == replace(fetched, stale=True)
    (note,) = hub.store.notes_on(stale.folder)
    assert note.startswith("stale: ") and "HTTP 503" in note and " UTC is used" in note
    assert "HTTP 503" in hub.refused(f"{SPEC}@other") and "HTTP 503" in hub.refused(digest="0" * 64)
    hub.origin.always.clear()
    assert hub.fetch() == fetched and hub.store.notes_on(fetched.folder) == ()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch().stale


def test_f69_down_and_damaged(hub: Hub) -> None:
    """F69, F54: a damaged copy is never served, not even while the origin is down."""
    fetched = hub.fetch()
    hub.again()
    data = bytearray((fetched.folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (fetched.folder / WEIGHTS).write_bytes(data)
    hub.origin.always["/"] = faults.reset
    with pytest.raises(AdapterUnavailable):
        hub.fetch()
    assert hub.store.counts.corrupt == 1
    hub.origin.always.clear()
    hub.again()
    assert hub.fetch() == fetched


def test_f70_branch_moves(hub: Hub, tmp_path: Path) -> None:
    """F70: a new commit is noticed when the source is resolved again, the old copy stays."""
    first = hub.fetch()
    commit = hub.origin.put_repository("acme/legal", write_good(tmp_path / "v2", seed=5))
    second = hub.fetch()
    assert (second.revision, second.digest != first.digest) == (commit, True)
    assert first.folder.is_dir()
    assert hub.fetch(digest=first.digest).folder == first.folder


def test_one_fetch_for_many(hub: Hub) -> None:
    """However many threads want it, it is fetched once."""
    found: list[Fetched] = []
    threads = [
        threading.Thread(target=lambda: found.append(hub.fetch()), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8 and hub.origin.count("/resolve/") == 2
