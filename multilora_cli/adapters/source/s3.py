"""Adapters in S3 and what speaks like it: `s3://bucket/prefix/`, each object at one version.

Endpoint and credentials come from the usual variables (AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL,
AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, a web identity or a
container's credentials); without any, requests are unsigned, as for public buckets. obstore finds
the credentials and signs; the bytes come through our own client, since obstore follows redirects
anywhere. The machine's own credentials from a metadata address are never asked for.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from multilora_cli.adapters.source.fetch import (
    FetchLimits,
    MissingError,
    Origin,
    RefusedError,
    RemoteFile,
    TransientError,
    host_of,
)
from multilora_cli.adapters.source.remote import Address
from multilora_cli.errors import AdapterError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()@=+,:-]+(/[A-Za-z0-9!_.*'()@=+,:-]+)*/?")
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_SIGNED_FOR = timedelta(minutes=15)  # counted where a request starts, not where it ends
_Sign = Callable[[str, str], str]


def parse_s3(text: str) -> Address:
    """The address of the text after `s3:`. Raises AdapterError, which never repeats the text."""
    bucket, _, prefix = text.removeprefix("//").partition("/")
    good = text.startswith("//") and _BUCKET.fullmatch(bucket) is not None
    parts = prefix.strip("/").split("/")
    if not good or _PREFIX.fullmatch(prefix) is None or {".", ".."} & set(parts):
        raise AdapterError(
            "source s3:...: expected s3://bucket/prefix/ and nothing else; keys are given in"
            " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            reason="address",
        )
    host = host_of(_endpoint(bucket)) or "S3"
    return Address(spec=f"s3://{bucket}/{prefix.strip('/')}/", host=host, is_fixed=False)


@contextmanager
def open_s3(address: Address, limits: FetchLimits) -> Iterator[Origin]:
    """The folder of `address`. Raises FetchError, AdapterError without obstore."""
    from multilora_cli.adapters.source.http import Hosts, HttpClient, check_endpoint

    bucket, _, prefix = address.spec.removeprefix("s3://").partition("/")
    endpoint = check_endpoint(_endpoint(bucket), "AWS_ENDPOINT_URL")
    signed = any(os.environ.get(name) for name in _CREDENTIALS)
    sign = _signer(address.spec, endpoint) if signed else _unsigned(bucket, endpoint)

    def explain(status: int) -> tuple[str, str]:
        if 300 <= status < 400 or status == 400:
            return "", f"the bucket may lie in another region than {_region()}: set AWS_REGION"
        if status not in (401, 403):
            return "", ""
        if not signed:
            return ": no access without credentials", "set AWS_ACCESS_KEY_ID and its secret"
        return (
            ": no access with the credentials given, or no such object",
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION",
        )

    with HttpClient(Hosts(endpoint), limits, {"User-Agent": "mlora"}, explain) as client:
        yield _Folder(client, sign, prefix)


class _Folder:
    """The objects directly below one prefix; `client` is an HttpClient."""

    def __init__(self, client: Any, sign: _Sign, prefix: str) -> None:
        self._client = client
        self._sign = sign
        self._prefix = prefix

    def revision(self) -> None:
        """Objects have versions, folders have none."""
        return None

    def look_up(self, names: Sequence[str]) -> dict[str, RemoteFile]:
        """Asks for these names alone: nothing is listed, however much lies beside them."""
        found = (self._head(name) for name in names)
        return {file.name: file for file in found if file is not None}

    def read(self, file: RemoteFile) -> Iterator[bytes]:
        """The object, if it still is the version that was looked up."""
        url = self._sign("GET", self._prefix + file.name)
        yield from self._client.read(url, file.size, {"If-Match": file.version})

    def _head(self, name: str) -> RemoteFile | None:
        try:
            headers = self._client.head(self._sign("HEAD", self._prefix + name))
        except MissingError:
            return None
        size, version = headers.get("content-length", ""), headers.get("etag", "")
        if not (size.isascii() and size.isdigit() and len(size) < 16):
            raise RefusedError(f"{name}: described without a size")
        if not 2 < len(version) < 200 or version.startswith("W/"):
            raise RefusedError(f"{name}: described without a strong ETag")
        return RemoteFile(name, int(size), version)


def _signer(spec: str, endpoint: str) -> _Sign:
    """Presigns with whatever credentials obstore finds."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        raise AdapterError(
            f"source {spec}: signing needs obstore, which is not installed",
            reason="source",
            hint='pip install "multilora-cli[s3]"',
        ) from None
    store = S3Store(
        spec.removeprefix("s3://").partition("/")[0],
        config={"endpoint": endpoint, "region": _region(), "virtual_hosted_style_request": False},
        client_options={"allow_http": endpoint.startswith("http:")},
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
    )

    def sign(method: str, key: str) -> str:
        try:
            return str(obstore.sign(store, method, key, _SIGNED_FOR))  # type: ignore[call-overload]
        except Exception as error:  # its texts may hold keys: they are not repeated
            raise TransientError(f"no credentials could be had ({type(error).__name__})") from None

    return sign


def _unsigned(bucket: str, endpoint: str) -> _Sign:
    return lambda _, key: f"{endpoint}/{bucket}/{quote(key)}"


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _endpoint(bucket: str) -> str:
    """Where the bucket is: the one that is set, else AWS itself."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name]
    return f"https://s3.{_region()}.amazonaws.com"
