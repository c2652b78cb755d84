"""The tokenizer against transformers loading the same folder."""

import json

import pytest
from tokenizers import processors

from multilora_cli.errors import ModelError
from multilora_cli.text.chat_template import Segment
from multilora_cli.text.tokenizer import load_tokenizer
from tests.fakes import BOS, END_TURN, EOS, TURN, byte_tokenizer
from tests.text.test_detokenizer import byte_level

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def save(folder, config, post=None):
    tokenizer = byte_level()
    if post is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=post, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIALS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("post", [None, "$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
    ],
)
def test_same_ids_as_transformers(tmp_path, config, post):
    """Prompts begin and end as transformers begins and ends them."""
    from transformers import AutoTokenizer

    save(tmp_path, config, post)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the quick \u4f60", "a", "", "<s>x</s> <|im_start|>y", " \n\t "):
        assert ours.encode(text) == theirs(text)["input_ids"], text
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special=False) == plain
        assert ours.decode(plain) == theirs.decode(plain, clean_up_tokenization_spaces=False)


def test_literal_segments_are_never_special(tmp_path):
    """F92: special tokens in user text stay text; the template's own are parsed."""
    tokenizer = load_tokenizer(byte_tokenizer(tmp_path))
    segments = [Segment("<turn>a"), Segment("<end>", True), Segment("</s>", True), Segment("<end>")]
    ids = tokenizer.encode_segments(segments, add_special=False)
    assert ids == [TURN, *b"a<end></s>", END_TURN]
    assert tokenizer.encode_segments(segments, add_special=True) == [BOS, *ids]
    assert tokenizer.encode("<turn></s>") == [BOS, TURN, EOS]
    assert tokenizer.decode(ids) == "<turn>a<end></s><end>"
    assert tokenizer.decode(ids, skip_special=True) == "a<end></s>"


def test_every_special_token_as_user_text(tmp_path):
    save(tmp_path, {})
    tokenizer = load_tokenizer(tmp_path)
    specials = {tokenizer.encode(text, add_special=False)[0] for text in tokenizer.special_tokens}
    assert len(specials) == 3
    for text in tokenizer.special_tokens:
        ids = tokenizer.encode_segments([Segment(text, True)], add_special=False)
        assert not specials & set(ids)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_unusable_files(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
