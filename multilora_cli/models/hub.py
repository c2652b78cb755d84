"""A base model from the Hugging Face Hub, pinned to one commit."""

import logging
import re
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from multilora_cli.errors import ModelError, Unreachable
from multilora_cli.models.checkpoint import INDEX_NAME, SINGLE_NAME, read_index
from multilora_cli.models.loader import Report

logger = logging.getLogger(__name__)

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    INDEX_NAME,
)


def fetch_model(model_id: str, revision: str | None = None, progress: Report | None = None) -> Path:
    """The local folder of a Hub model, fetched where needed; its name is the commit.

    Only config, tokenizer, template and the safetensors files that the model itself consists of
    are fetched. Offline, a copy that is complete in the local cache is used. Raises ModelError
    (no such model, revision or access) or Unreachable.
    """
    if not _MODEL_ID.fullmatch(model_id):
        raise ModelError(
            f"{model_id!r:.120}: neither an existing folder nor a Hub id such as org/name"
        )
    try:
        return _fetch(model_id, revision, progress)
    except GatedRepoError:
        raise ModelError(
            f"{model_id}: access to this model must be granted on the Hub first",
            hint="log in with `hf auth login`, or set HF_TOKEN",
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{model_id}: no revision {revision!r:.80} on the Hub") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model_id}: no such model on the Hub, or no access to it",
            hint="for a private model log in with `hf auth login`, or set HF_TOKEN",
        ) from None
    except HFValidationError as error:
        raise ModelError(f"{model_id}: {error}") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError) as e:
        raise Unreachable(
            f"{model_id}: the Hub does not answer and the local cache holds no complete copy"
            f" ({type(e).__name__})",
            hint="fetch it where there is a network, or name a local folder",
        ) from None


def commit_of(folder: Path) -> str | None:
    """The commit that `fetch_model` pinned `folder` to; None for any other folder."""
    name = folder.name
    return (
        name if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", name) else None
    )


def _fetch(model_id: str, revision: str | None, progress: Report | None) -> Path:
    try:
        commit = HfApi().model_info(model_id, revision=revision, timeout=30).sha
    except (OfflineModeIsEnabled, httpx.TransportError):
        folder = _snapshot(model_id, revision, list(_SMALL_FILES), local=True)
        return _snapshot(model_id, folder.name, _weight_files(folder), local=True)
    if commit is None:
        raise ModelError(f"{model_id}: the Hub names no commit for revision {revision!r:.80}")
    folder = _snapshot(model_id, commit, list(_SMALL_FILES))
    _snapshot(model_id, commit, _weight_files(folder), progress=progress)
    logger.info("model %s at commit %s in %s", model_id, commit, folder)
    return folder


def _snapshot(
    model_id: str,
    revision: str | None,
    patterns: list[str],
    *,
    local: bool = False,
    progress: Report | None = None,
) -> Path:
    folder = snapshot_download(
        model_id,
        revision=revision,
        allow_patterns=patterns,
        local_files_only=local,
        tqdm_class=_progress_bar(progress),
    )
    path = Path(folder)
    missing = [name for name in patterns if "*" not in name and name.endswith(".safetensors")]
    missing = [name for name in missing if not (path / name).exists()]
    if local and missing:
        raise LocalEntryNotFoundError(f"{missing[0]} is not in the local cache")
    if missing:
        raise ModelError(f"{model_id}: the Hub holds no file {missing[0]}")
    return path


def _weight_files(folder: Path) -> list[str]:
    """What the index names; repositories often hold the same weights a second time."""
    index = folder / INDEX_NAME
    return sorted(set(read_index(index).values())) if index.exists() else [SINGLE_NAME]


class _Bytes:
    """Bytes done and in total over the bars of one download, passed on as they grow.

    huggingface-hub 1.x shows one bar of bytes, 2.x one for what arrives and one for what is
    written: the furthest counts.
    """

    def __init__(self, progress: Report | None) -> None:
        self._progress = progress
        self._lock = Lock()
        self._done = 0

    def advance_to(self, done: int, total: int) -> None:
        """One of the bars is at `done` of `total` bytes."""
        with self._lock:
            if self._progress is not None and done > self._done:
                self._done = done
                self._progress("download", done, max(total, done))


def _progress_bar(progress: Report | None) -> type[tqdm]:
    """A silent bar class that passes byte counts on; counts of files are left out."""
    state = _Bytes(progress)

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self._in_bytes = kwargs.get("unit") == "B"
            self._done = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            if self._in_bytes:
                state.advance_to(self._done, int(self.total or 0))

    return Bar
