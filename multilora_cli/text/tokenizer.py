"""A tokenizer, from its tokenizer.json."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from multilora_cli.errors import ModelError
from multilora_cli.text.chat_template import Segment
from multilora_cli.text.detokenizer import Detokenizer
from multilora_cli.text.pieces import PieceTable

_TOKENIZER_BYTES_MAX = 256 * 2**20


class Tokenizer:
    """Text to ids and back. Encoding is thread-safe and releases the GIL for its main part."""

    def __init__(self, text: str) -> None:
        """`text`: content of tokenizer.json. Raises ModelError."""
        with _as_model_error():
            self._read(text)

    def _read(self, text: str) -> None:
        self._parsing = _parse(text)
        self._literal = _parse(text)
        self._literal.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        vocab = {i: token for token, i in self._parsing.get_vocab(with_added_tokens=True).items()}
        vocab |= {token_id: token.content for token_id, token in added.items()}
        self.special_tokens = tuple(token.content for token in added.values() if token.special)
        special_ids = frozenset(i for i, token in added.items() if token.special)
        self.pieces = PieceTable(vocab, special_ids, json.loads(text).get("decoder") or {})
        self.vocab_size = max(vocab, default=-1) + 1
        self._prefix, self._suffix = self._surroundings()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a plain prompt. Special tokens written in the text are parsed, as HF does."""
        ids = self._parsing.encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special else list(ids)

    def encode_segments(self, segments: Sequence[Segment], *, add_special: bool) -> list[int]:
        """Ids of a rendered conversation; literal segments never become special tokens."""
        ids: list[int] = []
        for segment in segments:
            tokenizer = self._literal if segment.literal else self._parsing
            ids += tokenizer.encode(segment.text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of whole ids, as the tokenizer's own decoder gives it."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=skip_special))

    def id_of(self, token: str) -> int | None:
        """The id of a token by its whole text; None: there is no such token."""
        return self._parsing.token_to_id(token)

    @property
    def max_id(self) -> int:
        """The largest id that encoding can give, the surroundings of a prompt included."""
        return max([self.vocab_size - 1, *self._prefix, *self._suffix])

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one sequence."""
        return Detokenizer(self.pieces, skip_special=skip_special)

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Ids before and after a plain prompt, as tokenizer.json's post-processor puts them.

        transformers 5 does the same: add_bos_token of tokenizer_config.json has no say where a
        tokenizer.json exists.
        """
        whole: list[int] = []
        for probe in ("a", "0", "the", "\u00e9"):  # one of them has a token in any vocabulary
            whole = self._parsing.encode(probe).ids
            bare = self._parsing.encode(probe, add_special_tokens=False).ids
            for at in range(len(whole) - len(bare) + 1):
                if bare and whole[at : at + len(bare)] == bare:
                    return whole[:at], whole[at + len(bare) :]
        return whole, []


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: missing; the tokenizer must be in this format",
            hint="convert it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained",
        )
    if path.stat().st_size > _TOKENIZER_BYTES_MAX:
        raise ModelError(f"{path}: {path.stat().st_size} bytes, expected at most 256 MiB")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8") from None
    try:
        return Tokenizer(text)
    except ModelError as error:
        raise ModelError(f"{folder}: {error.message}", hint=error.hint) from None


@contextmanager
def _as_model_error() -> Iterator[None]:
    """The library raises bare Exception for a bad file, and lets panics through as BaseException
    of a class that cannot be imported."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelError(f"tokenizer.json: {error}"[:400]) from None
        raise


def _parse(text: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
