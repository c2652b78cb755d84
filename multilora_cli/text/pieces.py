"""The bytes behind each token id, as the tokenizer's own decoder would join them.

Text is decoded from these bytes, so a character that spans tokens is never split and never
replaced, at O(bytes of the token) a step. Only the decoders of the supported families are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from multilora_cli.errors import ModelError

_METASPACE = "▁"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins of byte-level tokenizers: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


class PieceTable:
    """Bytes of every token id; special tokens are known and can be left out."""

    def __init__(
        self, vocab: Mapping[int, str], special_ids: frozenset[int], decoder: Mapping[str, Any]
    ) -> None:
        decode = _piece_decoder(decoder)
        self._pieces = {token_id: decode(token) for token_id, token in vocab.items()}
        self.special_ids = special_ids
        self._whole: tuple[dict[int, str], dict[int, str]] = ({}, {})
        # Bytes of the longest token: a text of n bytes has at least n / longest tokens.
        self.longest = max(map(len, self._pieces.values()), default=1) or 1

    def piece(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Bytes of one token; empty for ids without a token and for skipped special ones."""
        if skip_special and token_id in self.special_ids:
            return b""
        return self._pieces.get(token_id, b"")

    def whole_texts(self, *, skip_special: bool) -> dict[int, str]:
        """Text by id of tokens that begin and end between characters, as they are first met.

        Whoever decodes such a token puts it here for all others.
        """
        return self._whole[skip_special]

    def label(self, token_id: int) -> str:
        """Text that names one token in logprobs; `bytes:\\xe2` where it is part of a character."""
        piece = self.piece(token_id, skip_special=False)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _piece_decoder(decoder: Mapping[str, Any]) -> "_ByteLevel | _Replacing":
    kinds = [str(step.get("type")) for step in _steps(decoder)]
    if "ByteLevel" in kinds:
        return _ByteLevel()
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    unknown = [kind for kind in kinds if kind not in known]
    if unknown or not kinds:
        raise ModelError(
            f"tokenizer.json: decoder {unknown[0] if unknown else 'null'} is not supported;"
            " expected ByteLevel, Metaspace, or Replace, ByteFallback and Fuse"
        )
    return _Replacing(_steps(decoder), "ByteFallback" in kinds)


def _steps(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return list(decoder.get("decoders", []))
    return [decoder] if decoder else []


class _ByteLevel:
    def __call__(self, token: str) -> bytes:
        try:
            return bytes([_ALPHABET[char] for char in token])
        except KeyError:  # an added token stands as it is
            return token.encode()


class _Replacing:
    def __init__(self, steps: Sequence[Mapping[str, Any]], byte_fallback: bool) -> None:
        self._byte_fallback = byte_fallback
        self._replacements: list[tuple[str, str]] = []
        for step in steps:
            if step["type"] == "Metaspace":
                self._replacements.append((str(step.get("replacement", _METASPACE)), " "))
            elif step["type"] == "Replace":
                pattern = step["pattern"].get("String")
                if pattern is None:
                    raise ModelError("tokenizer.json: decoder Replace needs a String pattern")
                self._replacements.append((pattern, str(step["content"])))

    def __call__(self, token: str) -> bytes:
        if self._byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()
