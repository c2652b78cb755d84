"""An adapter's own tokenizer and template: what is read, what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.errors import AdapterError
from multilora_cli.text.adapter_text import OwnFiles, TextChecker
from tests.fakes import END_TURN, VOCAB, own_tokenizer

OWN = AdapterRequest("a", "x", tokenizer="adapter")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(folder: Path, request: AdapterRequest = OWN) -> str:
    with pytest.raises(AdapterError) as caught:
        TextChecker(VOCAB)(folder, request)
    assert str(folder) in caught.value.message
    return caught.value.message


def test_own_tokenizer_template_and_end(tmp_path: Path) -> None:
    own = OwnFiles(own_tokenizer(tmp_path), OWN).load(VOCAB)
    assert own.tokenizer is not None and own.template is not None
    assert own.tokenizer.encode("ab<note>") == [98, 97, VOCAB - 1]
    assert own.eos_ids == (END_TURN,) and own.names["eos_token"] == "<end>"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 258]}')
    assert OwnFiles(tmp_path, OWN).load(VOCAB).eos_ids == (END_TURN, 5, 258)
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert OwnFiles(tmp_path, OWN).load(VOCAB).template == "from file"


def test_each_can_be_had_alone(tmp_path: Path) -> None:
    own_tokenizer(tmp_path)
    tokenizer = AdapterRequest("a", "x", tokenizer="adapter", chat_template="base")
    assert OwnFiles(tmp_path, tokenizer).load(VOCAB).template is None
    template = AdapterRequest("a", "x", chat_template="adapter")
    (tmp_path / "tokenizer.json").unlink()
    own = OwnFiles(tmp_path, template).load(VOCAB)
    assert own.tokenizer is None and own.template is not None and own.eos_ids == ()
    assert "tokenizer.json: not there" in refusal(tmp_path, tokenizer)


def test_digest_is_of_what_is_used(tmp_path: Path) -> None:
    own_tokenizer(tmp_path)
    seen = {OwnFiles(tmp_path, OWN).digest}
    template = AdapterRequest("a", "x", chat_template="adapter")
    seen.add(OwnFiles(tmp_path, template).digest)
    change(tmp_path / "tokenizer_config.json", model_max_length=7)
    seen.add(OwnFiles(tmp_path, OWN).digest)
    (tmp_path / "chat_template.jinja").write_text("x")
    seen.add(OwnFiles(tmp_path, OWN).digest)
    assert len(seen) == 4
    (tmp_path / "README.md").write_text("of no matter")
    assert OwnFiles(tmp_path, OWN).digest in seen
    assert TextChecker(VOCAB)(tmp_path, OWN) in seen


def test_a_vocabulary_beyond_the_base_is_refused(tmp_path: Path) -> None:
    own_tokenizer(tmp_path)
    TextChecker(VOCAB)(tmp_path, OWN)
    with pytest.raises(AdapterError) as caught:
        TextChecker(VOCAB - 1)(tmp_path, OWN)
    assert f"ids up to {VOCAB - 1:,}" in caught.value.message
    assert f"has {VOCAB - 1:,} rows" in caught.value.message and caught.value.reason == "vocabulary"
    parts = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"x": {"id": "x", "ids": [VOCAB], "tokens": ["x"]}}
    processor = {"type": "TemplateProcessing", "single": parts, "pair": parts}
    change(tmp_path / "tokenizer.json", post_processor=processor | {"special_tokens": tokens})
    assert f"ids up to {VOCAB:,}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "tokenizer.json: not there"),
        ("tokenizer_config.json", None, "tokenizer_config.json: not there"),
        ("tokenizer.json", b"{}", "tokenizer.json: "),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: not UTF-8"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: found list, expected an object"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", b'{"eos_token": "<end>"}', "no chat template"),
        ("tokenizer_config.json", b'{"chat_template": "x"}', "no eos_token"),
        ("tokenizer_config.json", b'{"chat_template": "x", "eos_token": "<nix>"}', "eos_token"),
        ("tokenizer_config.json", b'{"chat_template": 3, "eos_token": "<end>"}', "chat_template"),
        ("chat_template.jinja", b"{% for %}", "chat template: TemplateSyntaxError"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not UTF-8"),
        ("chat_template.jinja", b" " * (2**18 + 1), "262,145 bytes, expected at most 262,144"),
        ("generation_config.json", b'{"eos_token_id": 300000}', "eos_token_id: expected ids below"),
        ("generation_config.json", b'{"eos_token_id": [true]}', "eos_token_id: expected ids below"),
    ],
)
def test_missing_and_broken_files(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    own_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert words in refusal(tmp_path)


def test_what_the_library_panics_about_is_a_refusal(tmp_path: Path) -> None:
    own_tokenizer(tmp_path)
    change(
        tmp_path / "tokenizer.json",
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    )
    assert "tokenizer.json: Precompiled" in refusal(tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    own_tokenizer(tmp_path / "a")
    secret = tmp_path / "secret"
    secret.write_text("key")
    (tmp_path / "a" / "chat_template.jinja").symlink_to(secret)
    message = refusal(tmp_path / "a")
    assert "chat_template.jinja" in message and "key" not in message
