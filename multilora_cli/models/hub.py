"""A base model from the Hugging Face Hub, pinned to one commit."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import ModelError, Unreachable
from multilora_cli.models.checkpoint import INDEX_NAME, SINGLE_NAME, read_index
from multilora_cli.progress import Report, silent

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # for the Hub to answer a look at a small file, before the cache is taken
_CONFIG = "config.json"
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_SMALL_FILES = (
    _CONFIG,
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


# Version 1 of huggingface-hub raises httpx's errors, version 2 those of another client: the common
# base of what its own error class derives from is right for both.
_HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]


def fetch_model(
    model_id: str,
    revision: str | None = None,
    report: Report = silent,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The local folder of a Hub model, fetched where needed; the folder's name is the commit.

    Only config, tokenizer, template and the safetensors files that the model itself consists of
    are fetched. Where the Hub does not answer, a complete copy in the local cache is used.
    `cache` and `endpoint` default to huggingface-hub's own. Raises ModelError (no such model,
    revision or access) or Unreachable.
    """
    _check_id(model_id)
    with _hub_errors(model_id, revision):
        source = _Source(model_id, cache, endpoint)
        # The first call resolves the revision; the second asks for that very commit.
        folder = source.snapshot(revision, list(_SMALL_FILES), silent)
        weights = _weight_files(folder)
        source.snapshot(folder.name, weights, report)
        missing = [name for name in weights if not (folder / name).exists()]
    if missing:
        raise ModelError(f"{model_id}: {missing[0]} is neither on the Hub nor in the local cache")
    logger.info("model %s at commit %s in %s", model_id, folder.name, folder)
    return folder


def fetch_config(
    model_id: str,
    revision: str | None = None,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """A folder with the config.json of a Hub model, and nothing more of it.

    A Hub that does not answer within ANSWER_S is not asked again: what the local cache has is
    taken. Raises ModelError (no such model, revision or access) or Unreachable.
    """
    _check_id(model_id)
    answers = _Deadline(lambda: _look_up(model_id, revision, endpoint)).result()
    with _hub_errors(model_id, revision):
        if isinstance(answers, Exception) and not _is_silence(answers):
            raise answers
        try:
            path = hf_hub_download(
                model_id, _CONFIG, revision=revision, cache_dir=cache, endpoint=endpoint,
                local_files_only=answers is not None,
            )  # fmt: skip
        except LocalEntryNotFoundError:
            raise Unreachable(
                f"{model_id}: the Hub does not answer, and the local cache has no {_CONFIG} of it",
                hint=f"name a folder with its {_CONFIG} as base.model, or fetch that where there"
                f" is a network: hf download {model_id} {_CONFIG}",
            ) from None
    return Path(path).parent


def _look_up(model_id: str, revision: str | None, endpoint: str | None) -> None:
    """Ask for config.json once. Raises what huggingface-hub raises."""
    url = hf_hub_url(model_id, _CONFIG, revision=revision, endpoint=endpoint)
    get_hf_file_metadata(url, timeout=ANSWER_S, endpoint=endpoint)


def _is_silence(error: Exception) -> bool:
    """Whether there was no answer, or a busy one, rather than a no."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, OfflineModeIsEnabled | TimeoutError | OSError | _HTTP_ERROR)


class _Deadline:
    """Work in a thread of its own that is given ANSWER_S: looking up a name cannot be ended."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="hub-look-up", daemon=True)

    def result(self) -> Exception | None:
        """What it raised, TimeoutError where it did not end; None: it did."""
        self._thread.start()
        self._thread.join(ANSWER_S)
        return TimeoutError() if self._thread.is_alive() else self._error

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error


def _check_id(model_id: str) -> None:
    if not _MODEL_ID.fullmatch(model_id):
        raise ModelError(
            f"{quoted(model_id)}: neither an existing folder nor a Hub id such as org/name"
        )


@contextmanager
def _hub_errors(model_id: str, revision: str | None) -> Iterator[None]:
    """Turns what huggingface-hub raises into errors of one line."""
    try:
        yield
    except GatedRepoError:
        raise ModelError(
            f"{model_id}: access to this model must be granted on the Hub first",
            hint="log in with `hf auth login`, or set HF_TOKEN",
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{model_id}: no revision {quoted(revision)} on the Hub") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model_id}: no such model on the Hub, or no access to it",
            hint="for a private model log in with `hf auth login`, or set HF_TOKEN",
        ) from None
    except RemoteEntryNotFoundError:
        raise ModelError(
            f"{model_id}: not a model in Hugging Face format: a file it needs is not on the Hub",
            hint="is it a GGUF or another format? name a safetensors repository",
        ) from None
    except HFValidationError as error:
        raise ModelError(f"{model_id}: {error}") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, _HTTP_ERROR):
        raise Unreachable(
            f"{model_id}: the Hub does not answer and the local cache holds no complete copy",
            hint="fetch it where there is a network, or name a local folder",
        ) from None
    except OSError as error:
        raise ModelError(f"{model_id}: cannot be stored: {error}") from None


@dataclass(frozen=True)
class _Source:
    """One model on one Hub, with the cache it is stored in."""

    model_id: str
    cache: Path | None
    endpoint: str | None

    def snapshot(self, revision: str | None, patterns: list[str], report: Report) -> Path:
        """The snapshot folder after the files that match `patterns` were fetched."""
        folder = snapshot_download(
            self.model_id,
            revision=revision,
            cache_dir=self.cache,
            endpoint=self.endpoint,
            allow_patterns=patterns,
            tqdm_class=_progress_bar(report),
        )
        return Path(folder)


def _weight_files(folder: Path) -> list[str]:
    """What the index names; repositories often hold the same weights a second time."""
    index = folder / INDEX_NAME
    return sorted(set(read_index(index).values())) if index.exists() else [SINGLE_NAME]


class _Bytes:
    """Bytes done and in total over the bars of one download, passed on as they grow.

    huggingface-hub 1.x shows one bar of bytes, 2.x one for what arrives and one for what is
    written: the furthest counts.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = Lock()
        self._done = 0

    def advance_to(self, done: int, total: int) -> None:
        """One of the bars is at `done` of `total` bytes."""
        with self._lock:
            if done > self._done:
                self._done = done
                self._report("download", done, max(total, done))


def _progress_bar(report: Report) -> type[tqdm]:
    """A silent bar class that passes byte counts on; counts of files are left out."""
    state = _Bytes(report)

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
