"""The tokenizer and the chat template of an adapter: in its own folder, or a file of the operator.

Files are read whole and once, so that what is parsed is what the digest names. Symlinks are
refused as for weights; templates run in the sandbox.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.adapters.safetensors_header import SafetensorsError, open_file
from multilora_cli.adapters.text_files import (
    BYTES_MAX,
    GENERATION_NAME,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
)
from multilora_cli.adapters.text_files import TOKENIZER_CONFIG_NAME as CONFIG_NAME
from multilora_cli.errors import AdapterError, ModelError
from multilora_cli.text.chat_template import (
    ChatTemplate,
    json_object,
    special_names,
    template_source,
)
from multilora_cli.text.tokenizer import Tokenizer

_KNOWN_MAX = 4096


@dataclass(frozen=True, slots=True)
class OwnText:
    """What an adapter brings: a tokenizer, a template, or both.

    `tokenizer` None: the base's; `names` and `eos_ids` are then empty. `template` is its source,
    None: the base's.
    """

    tokenizer: Tokenizer | None
    names: Mapping[str, str]  # bos_token and the like
    eos_ids: tuple[int, ...]
    template: str | None


class OwnFiles:
    """The files of one adapter's text, read. Raises AdapterError for missing and unsafe ones."""

    def __init__(self, folder: Path, request: AdapterRequest) -> None:
        self._folder = folder
        self._name, self._template_file = request.name, request.template_file
        self._has_tokenizer = request.uses_own_tokenizer
        self._has_template = request.uses_own_template or self._template_file is not None
        needed = {TOKENIZER_NAME, CONFIG_NAME} if self._has_tokenizer else set()
        self._raw: dict[str, bytes] = {}
        for name in request.text_files:
            if os.path.lexists(folder / name):
                self._raw[name] = _read(folder / name, BYTES_MAX[name])
            elif name in needed:
                self._refuse(f"{name}: not there; tokenizer: adapter needs it", "missing", name)
        if self._template_file is not None:
            self._raw[TEMPLATE_NAME] = self._read_template(Path(self._template_file))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over what is used of the folder, names and sizes included."""
        choice = f"mlora text\0{self._has_tokenizer:d}{self._has_template:d}\0"
        total = hashlib.sha256(choice.encode())
        for name, raw in self._raw.items():
            total.update(f"{name}\0{len(raw)}\0".encode())
            total.update(raw)
        return total.hexdigest()

    def load(self, vocab_size: int) -> OwnText:
        """Parsed and checked; `vocab_size`: rows of the base's embedding. Raises AdapterError."""
        try:
            return self._load(vocab_size)
        except ModelError as error:
            raise AdapterError(
                f"adapter {self._folder}: {error.message}", reason="tokenizer", hint=error.hint
            ) from None

    def _load(self, vocab_size: int) -> OwnText:
        config = self._json(CONFIG_NAME)
        template = self._template(config) if self._has_template else None
        if not self._has_tokenizer:
            return OwnText(None, {}, (), template)
        try:
            tokenizer = Tokenizer(self._raw[TOKENIZER_NAME].decode())
        except UnicodeDecodeError:
            raise ModelError(f"{TOKENIZER_NAME}: not UTF-8") from None
        if tokenizer.max_id >= vocab_size:
            self._refuse(
                f"{TOKENIZER_NAME}: ids up to {tokenizer.max_id:,}, but the base's embedding has"
                f" {vocab_size:,} rows: tokens were added in training, which is not supported"
                " beyond the base's rows",
                "vocabulary",
                "tokenizer",
            )
        names = special_names(config)
        return OwnText(tokenizer, names, self._eos_ids(names, tokenizer, vocab_size), template)

    def _read_template(self, path: Path) -> bytes:
        """The operator's own file; a link to it is followed, as mounted settings are links."""
        if not path.is_file():
            self._refuse_template(f"{path}: not there, or not a file", "missing")
        try:
            return _read(Path(os.path.realpath(path)), BYTES_MAX[TEMPLATE_NAME])
        except AdapterError as error:
            self._refuse_template(error.message, error.reason)

    def _operators_template(self) -> str:
        try:
            source = template_source({}, self._raw[TEMPLATE_NAME], ".")
            assert source is not None
            ChatTemplate(source, {}, ())  # says what is wrong with it
        except ModelError as error:
            message = error.message.removeprefix("./").removeprefix(f"{TEMPLATE_NAME}: ")
            self._refuse_template(f"{self._template_file}: {message}", "tokenizer")
        return source

    def _template(self, config: Mapping[str, Any]) -> str:
        if self._template_file is not None:
            return self._operators_template()
        source = template_source(config, self._raw.get(TEMPLATE_NAME), ".")
        if source is None:
            self._refuse(
                f"no chat template: neither {TEMPLATE_NAME} nor chat_template in {CONFIG_NAME};"
                " add one, or say chat_template: base",
                "missing",
                "chat_template",
            )
        ChatTemplate(source, {}, ())  # says what is wrong with it
        return source

    def _eos_ids(
        self, names: Mapping[str, str], tokenizer: Tokenizer, vocab_size: int
    ) -> tuple[int, ...]:
        """Of eos_token, and of generation_config.json where the adapter has one."""
        declared = self._json(GENERATION_NAME).get("eos_token_id")
        ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
            self._refuse(
                f"{GENERATION_NAME}: eos_token_id: expected ids below {vocab_size:,}",
                "tokenizer",
                "eos_token_id",
            )
        if "eos_token" in names:
            own = tokenizer.id_of(names["eos_token"])
            if own is None:
                self._refuse(
                    f"{CONFIG_NAME}: eos_token: found a token that {TOKENIZER_NAME} does not have",
                    "tokenizer",
                    "eos_token",
                )
            ids = [own, *ids]
        if not ids:
            self._refuse(
                f"{CONFIG_NAME}: no eos_token: answers would have no end", "tokenizer", "eos_token"
            )
        return tuple(dict.fromkeys(ids))

    def _json(self, name: str) -> dict[str, Any]:
        raw = self._raw.get(name)
        return {} if raw is None else json_object(raw, name)

    def _refuse_template(self, message: str, reason: str) -> NoReturn:
        raise AdapterError(
            f"adapter {self._name}: chat_template: {message}", reason=reason, field="chat_template"
        )

    def _refuse(self, message: str, reason: str, field: str) -> NoReturn:
        raise AdapterError(f"adapter {self._folder}: {message}", reason=reason, field=field)


class TextChecker:
    """Refuses at registration what could not be served; any thread may call it.

    Nothing parsed is kept. A digest that was good once is not parsed again: fleets repeat a few
    tokenizers, and one of 128,256 tokens takes 0.8 s.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: dict[str, None] = {}

    def __call__(self, folder: Path, request: AdapterRequest) -> str:
        """The digest of the adapter's own text. Raises AdapterError."""
        files = OwnFiles(folder, request)
        digest = files.digest
        if digest not in self._known:
            files.load(self._vocab_size)
            if len(self._known) >= _KNOWN_MAX:
                self._known = {}
            self._known[digest] = None
        return digest


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with open_file(path) as file:
            if file.identity.size > max_bytes:
                raise AdapterError(
                    f"{path}: {file.identity.size:,} bytes, expected at most {max_bytes:,}",
                    reason="too_large",
                )
            raw = file.read(0, file.identity.size)
            file.check_unchanged()
    except SafetensorsError as error:
        raise AdapterError(error.message, reason=error.reason) from None
    return raw
