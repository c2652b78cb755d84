"""A fleet of random weights, so that a server can be measured without any download.

A folder with the shape of a base, a tokenizer with as many tokens as the base has, and a fleet
file whose adapters are `dummy:` ones. Any id gives text, as a real model's do.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from multilora_cli.bench.geometries import config_folder
from multilora_cli.bench.neutral import Setting
from multilora_cli.text.pieces import byte_alphabet

_PINNED_MAX = 256  # adapters; more of them need not fit a device
_END = "<|end|>"
_SPACE = "\u0120"  # how byte-level tokenizers write one
_SYLLABLES = "aeiou", "bdfgklmnprstvz"
_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_fleet(folder: Path, model: str, quantization: str, settings: Sequence[Setting]) -> Path:
    """Write base, tokenizer and fleet file below `folder`; gives the fleet file. BadInput.

    The names of each setting's adapters are in a file of its own, for --adapters-from.
    """
    write_base(folder, model, quantization)
    adapters: list[dict[str, str]] = []
    for setting in settings:
        mine = [
            {"name": f"{setting.name}-{index}", "source": source}
            for index, source in enumerate(setting.sources)
        ]
        names = "".join(f"{adapter['name']}\n" for adapter in mine)
        (folder / f"{setting.name}.names").write_text(names, encoding="utf-8")
        adapters += mine
    if len(adapters) <= _PINNED_MAX:
        adapters = [{**adapter, "pin": "hot"} for adapter in adapters]
    fleet = {
        "base": {
            "model": "./base",
            "name": Path(model).name,
            "load_format": "dummy",
            "quantization": "auto" if quantization == "awq" else quantization,
            "max_model_len": 2048,
        },
        "adapters": adapters,
    }
    path = folder / "fleet.yaml"
    path.write_text(json.dumps(fleet, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    return path


def write_base(folder: Path, model: str, quantization: str, vocab_size: int = 0) -> Path:
    """A base without weights in `folder`/base, of another vocabulary where asked. BadInput."""
    shape = config_folder(model, quantization, folder)
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = vocab_size or config["vocab_size"]
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    _write(base / "config.json", config)
    _write(base / "tokenizer.json", tokenizer(int(config["vocab_size"])))
    _write(base / "tokenizer_config.json", {"eos_token": _END, "chat_template": _CHAT})
    return base


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: 256 bytes, words of syllables, and an end.

    Text of its words is encoded into the same ids again, so that clients that count tokens by
    their own encoding count right.
    """
    merges = list(islice(_merges(), vocab_size - 257))
    tokens = [*byte_alphabet(), *("".join(pair) for pair in merges), _END]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocab_size - 1, "content": _END, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
        ],
        "pre_tokenizer": {"type": "ByteLevel", **_BYTE_LEVEL},
        "decoder": {"type": "ByteLevel", **_BYTE_LEVEL},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }  # fmt: skip


def _merges() -> Iterator[tuple[str, str]]:
    """`b a`, then ` ba`, ` baba`, ` bababa` ...: each of a shorter word and one more syllable."""
    vowels, consonants = _SYLLABLES
    syllables = ["".join(pair) for pair in product(consonants, vowels)]
    yield from product(consonants, vowels)
    words = [_SPACE]
    while True:
        yield from product(words, syllables)
        words = ["".join(pair) for pair in product(words, syllables)]


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")
