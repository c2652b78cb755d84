"""Adapters on the Hugging Face Hub: `hf://org/name@revision`, read at one commit.

Token and endpoint are the ones huggingface-hub uses (HF_TOKEN or the saved login, HF_ENDPOINT).
The bytes come through our own client: the library checks sizes only, follows redirects anywhere,
and retries without an end to it.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OBJECT_ID = re.compile(r"[0-9a-f]{40,64}")
_ANSWER_BYTES_MAX = 2**20
# Where the Hub keeps large files.
_DOMAINS = ("huggingface.co", "hf.co")


def parse_hub(text: str) -> Address:
    """The address of the text after `hf:`. Raises AdapterError."""
    name, _, revision = text.removeprefix("//").partition("@")
    revision = revision or "main"
    good = text.startswith("//") and _REPOSITORY.fullmatch(name) is not None
    if not good or _REVISION.fullmatch(revision) is None or ".." in text:
        raise AdapterError(
            f"source {quoted(f'hf:{text}')}: expected hf://org/name or hf://org/name@revision",
            reason="address",
        )
    return Address(
        spec=f"hf://{name}@{revision}",
        host=host_of(_endpoint()) or "the Hub",
        is_fixed=_COMMIT.fullmatch(revision) is not None,
    )


@contextmanager
def open_hub(address: Address, limits: FetchLimits) -> Iterator[Origin]:
    """The repository of `address`. Raises FetchError."""
    from huggingface_hub import get_token

    from multilora_cli.adapters.source.http import Hosts, HttpClient, check_endpoint

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise TransientError("HF_HUB_OFFLINE is set", no_contact=True)
    endpoint = check_endpoint(_endpoint(), "HF_ENDPOINT")
    token = get_token()
    headers = {"User-Agent": "mlora"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def explain(status: int) -> tuple[str, str]:
        if status not in (401, 403):
            return "", ""
        if token:
            return (
                ": no access with the token given",
                "check that HF_TOKEN may read this repository, and that it exists; a gated"
                " repository must be asked for on its page first",
            )
        return (
            ": no access without a token, or no such repository",
            "set HF_TOKEN to a token that may read it",
        )

    name, _, revision = address.spec.removeprefix("hf://").partition("@")
    with HttpClient(Hosts(endpoint, _DOMAINS), limits, headers, explain) as client:
        yield _Repository(client, endpoint, name, revision)


class _Repository:
    """One model repository; `client` is an HttpClient."""

    def __init__(self, client: Any, endpoint: str, name: str, revision: str) -> None:
        self._client = client
        self._endpoint = endpoint
        self._name = name
        self._asked = revision
        self._commit = ""

    def revision(self) -> str:
        """The commit that the asked revision stands for now."""
        url = f"{self._endpoint}/api/models/{self._name}/revision/{quote(self._asked, safe='')}"
        try:
            answer = self._client.json("GET", f"{url}?expand=sha", max_bytes=_ANSWER_BYTES_MAX)
        except MissingError as error:
            if error.hint:
                raise  # says which credential may be lacking
            raise MissingError(
                f"HTTP 404: no repository {self._name} with a revision {self._asked}"
            ) from None
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise RefusedError("names no commit for the revision")
        if _COMMIT.fullmatch(self._asked) and commit != self._asked:
            raise RefusedError(f"answers with commit {commit} when asked for {self._asked}")
        self._commit = commit
        return commit

    def look_up(self, names: Sequence[str]) -> dict[str, RemoteFile]:
        """Asks for these names alone, so that a repository may hold any number of others."""
        url = f"{self._endpoint}/api/models/{self._name}/paths-info/{self._commit}"
        answer = self._client.json(
            "POST",
            url,
            data={"paths": list(names), "expand": "false"},
            max_bytes=_ANSWER_BYTES_MAX,
        )
        if not isinstance(answer, list):
            raise RefusedError("answers a question for files with something else")
        found = (_as_file(item) for item in answer if isinstance(item, dict))
        return {file.name: file for file in found if file is not None and file.name in names}

    def read(self, file: RemoteFile) -> Iterator[bytes]:
        """The file at the commit, from wherever the Hub keeps it."""
        url = f"{self._endpoint}/{self._name}/resolve/{self._commit}/{quote(file.name)}"
        yield from self._client.read(url, file.size, {})


def _as_file(item: dict[str, Any]) -> RemoteFile | None:
    """A file as `paths-info` describes it; None for folders. Raises RefusedError."""
    if item.get("type") != "file":
        return None
    name, size, lfs = item.get("path"), item.get("size"), item.get("lfs")
    sha256 = None
    version = item.get("oid")
    if isinstance(lfs, dict):
        # The library has called it oid and sha256.
        sha256 = version = lfs.get("oid") or lfs.get("sha256")
        size = lfs.get("size", size)
        if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
            raise RefusedError(f"{quoted(name)}: no SHA-256 for a large file")
    if (
        not isinstance(name, str)
        or type(size) is not int
        or size < 0
        or not isinstance(version, str)
        or _OBJECT_ID.fullmatch(version) is None
    ):
        raise RefusedError(f"{quoted(name)}: described without size or object id")
    return RemoteFile(name, size, version, sha256)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
