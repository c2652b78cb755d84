"""The text of every adapter version: the base's, or its own, loaded when it is first asked for."""

import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from multilora_cli.adapters.entry import AdapterEntry
from multilora_cli.adapters.keyed_locks import KeyedLocks
from multilora_cli.errors import AdapterError
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.contract import about_adapter, unavailable
from multilora_cli.server.prepare import Texts
from multilora_cli.text.adapter_text import OwnFiles
from multilora_cli.text.chat_template import (
    ChatTemplate,
    read_template_source,
    read_tokenizer_config,
    special_names,
)
from multilora_cli.text.tokenizer import load_tokenizer

KEPT = 8  # one of 128,256 tokens and a 5.3 MB file takes 90 MB, and 0.8 s of CPU to load


class AdapterTexts:
    """Texts by content: adapters with the same files share one. Any thread may call it.

    The least recently used leaves beyond `KEPT`, and so does what no name stands for any more;
    requests go on with what they were admitted with.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Reads the base's. Raises ModelError."""
        self._config = config
        folder = config.base_path
        tokenizer = load_tokenizer(folder)
        fields = read_tokenizer_config(folder)
        self._names = special_names(fields)
        self._source = read_template_source(folder, fields)
        template = None
        if self._source is not None:
            template = ChatTemplate(self._source, self._names, tokenizer.special_tokens)
        self.base = Texts(config, tokenizer, template, config.eos_token_ids)
        self._own: OrderedDict[str, Texts] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = KeyedLocks()

    def of(self, entry: AdapterEntry | None) -> Texts:
        """The text of a version; None: the base's. May read files: call it off the event loop.

        Raises RequestError (503) where the files are no longer those that were registered.
        """
        found = self.kept(entry)
        if found is not None or entry is None or entry.text is None:
            return found or self.base
        with self._loading.holding(entry.text):
            found = self.kept(entry)
            if found is None:
                found = self._load(entry, entry.text)
                with self._lock:
                    self._own[entry.text] = found
                    while len(self._own) > KEPT:
                        self._own.popitem(last=False)
        return found

    def kept(self, entry: AdapterEntry | None) -> Texts | None:
        """`of` where no file has to be read, else None."""
        if entry is None or entry.text is None:
            return self.base
        with self._lock:
            found = self._own.get(entry.text)
            if found is not None:
                self._own.move_to_end(entry.text)
        return found

    @property
    def num_kept(self) -> int:
        """How many are loaded beside the base's."""
        return len(self._own)

    def keep_only(self, digests: Collection[str]) -> None:
        """Drop what is loaded of other content."""
        with self._lock:
            for digest in self._own.keys() - set(digests):
                del self._own[digest]

    def _load(self, entry: AdapterEntry, digest: str) -> Texts:
        try:
            files = OwnFiles(Path(entry.path), entry.request)
            if files.digest != digest:
                raise AdapterError(
                    f"{entry.path}: tokenizer or chat template changed since it was registered"
                )
            own = files.load(self._config.vocab_size)
        except AdapterError as error:
            message = about_adapter(entry.name, error.message, (entry.path, entry.source))
            raise unavailable("adapter_unavailable", message) from None
        base = self.base
        source = self._source if own.template is None else own.template
        tokenizer = own.tokenizer or base.tokenizer
        names = self._names if own.tokenizer is None else own.names
        return Texts(
            self._config,
            tokenizer,
            None if source is None else ChatTemplate(source, names, tokenizer.special_tokens),
            base.eos_ids if own.tokenizer is None else own.eos_ids,
            "base" if own.template is None else "adapter",
        )
