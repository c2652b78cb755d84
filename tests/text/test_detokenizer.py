"""Incremental decoding as properties, against the tokenizers library's whole decode."""

import itertools
import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from multilora_cli.errors import ModelError
from multilora_cli.text.detokenizer import Found, StopMatcher
from multilora_cli.text.pieces import PieceTable
from multilora_cli.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "na\u00efve caf\u00e9 \u20ac5 \u4f60\u597d\u4e16\u754c \ud55c\uae00 \U0001f600\U0001f601",
    "def f(x):\n    return x ** 2  # comment\n\n\tif True: pass",
] * 20
TEXTS = st.text(
    st.sampled_from("ab the\u00e9\u20ac\u4f60\u597d\U0001f600\U0001f601\n\t0.,\u0301\u200d"),
    max_size=40,
)


def byte_level():
    """A trained byte-level BPE, as Llama 3, Qwen and Mistral's newer ones are."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>", "<|im_start|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "h3llo"])
    return tokenizer


def byte_fallback():
    """SentencePiece's form with byte fallback, as Llama 2 and the first Mistral are."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["\u2581", *"abthe0.,", "\u2581the", "th", "he", "\u2581t", "\u4f60", "the"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("\u2581", "t"), ("\u2581", "the"), ("h", "e")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


LIBRARY = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
OURS = {name: Tokenizer(library.to_str()) for name, library in LIBRARY.items()}


def parts_of(tokenizer, ids, **kwargs):
    detokenizer = tokenizer.detokenizer(**kwargs)
    return [detokenizer.add(token_id) for token_id in ids]


@pytest.mark.parametrize("name", LIBRARY)
def test_joined_parts_are_the_whole_decode(name):
    """A-API-09: any text, tokenized and streamed, comes out as the library decodes it."""

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(TEXTS)
    def check(text):
        ids = LIBRARY[name].encode(text).ids
        whole = LIBRARY[name].decode(ids)
        joined = "".join(parts_of(OURS[name], ids))
        # The answer follows a prompt: only a whole text loses SentencePiece's first space.
        assert joined == (whole if name == "byte_level" or not ids else f" {whole}")
        assert "\ufffd" not in joined

    check()


def test_cut_anywhere_shows_only_whole_characters():
    """A-API-09: every prefix of ids gives a prefix of the text without U+FFFD."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(TEXTS)
    def check(text):
        ids = LIBRARY["byte_level"].encode(text).ids
        for end in range(len(ids) + 1):
            assert text.startswith("".join(parts_of(OURS["byte_level"], ids[:end])))

    check()


def test_any_ids_decode_as_the_library_does():
    """Ids that are not valid UTF-8 together: the same replacement marks, open ends dropped."""

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, 505), max_size=12), st.booleans())
    def check(ids, skip):
        whole = LIBRARY["byte_level"].decode(ids, skip_special_tokens=skip)
        joined = "".join(parts_of(OURS["byte_level"], ids, skip_special=skip))
        assert whole == joined or (whole.startswith(joined) and whole[len(joined) :] == "\ufffd")

    check()


def test_special_tokens_are_left_out_or_kept():
    tokenizer = OURS["byte_level"]
    ids = LIBRARY["byte_level"].encode("<s>a<think>h3llo</s>").ids
    assert "".join(parts_of(tokenizer, ids)) == "a<think>h3llo"
    assert "".join(parts_of(tokenizer, ids, skip_special=False)) == "<s>a<think>h3llo</s>"


def test_labels():
    pieces = OURS["byte_fallback"].pieces
    assert pieces.label(3 + 0xE4) == "bytes:\\xe4"
    assert pieces.label(3 + 0x41) == "A"
    assert pieces.label(10**9) == ""
    assert OURS["byte_level"].pieces.longest >= 12


@pytest.mark.parametrize(
    "decoder",
    [{}, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "CTC"}]},
     {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}],
)  # fmt: skip
def test_other_decoders_are_refused(decoder):
    with pytest.raises(ModelError, match="decoder"):
        PieceTable({0: "a"}, frozenset(), decoder)


def test_metaspace():
    table = PieceTable({0: "\u2581a"}, frozenset(), {"type": "Metaspace", "replacement": "\u2581"})
    assert table.piece(0) == b" a"


# ---- stop strings


def matched(stops, parts, include=False):
    matcher, out = StopMatcher(stops, include=include), []
    for part in parts:
        found = matcher.add(part)
        if isinstance(found, Found):
            return [*out, found.text], found.stop
        out.append(found)
    return [*out, matcher.flush()], None


def oracle(stops, text):
    """End of the stop that completes first; of several that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_stops_are_found_wherever_they_are_split():
    """A-API-08, F91: same text and same stop as a search in the whole; nothing leaks early."""

    @settings(max_examples=600, deadline=None, derandomize=True)
    @given(
        st.text("ab\u00e9", max_size=30),
        st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4),
        st.lists(st.integers(0, 30), max_size=10),
    )
    def check(text, stops, cuts):
        places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(places)]
        sent, stop = matched(stops, parts)
        assert ("".join(sent), stop) == oracle(stops, text)
        kept, again = matched(stops, parts, include=True)
        assert again == stop
        assert "".join(kept) == oracle(stops, text)[0] + (stop or "")
        # What is sent early is final: it never has to be taken back.
        assert text.startswith("".join(sent))

    check()


def test_only_what_may_become_a_stop_is_held():
    matcher = StopMatcher(["abc"])
    assert [matcher.add(part) for part in ("x", "a", "b", "d", "ab")] == ["x", "", "", "abd", ""]
    assert matcher.flush() == "ab"


def test_matching_is_linear():
    """F91: a stop that almost matches for ever costs the same per character."""

    def cost_s(length):
        matcher = StopMatcher(["a" * 255 + "b"] * 4)
        started_s = time.process_time()
        for _ in range(length):
            matcher.add("a")
        return time.process_time() - started_s

    cost_s(1000)
    assert cost_s(20_000) < 60 * max(cost_s(2_000), 1e-4)


def test_decoder_json_is_what_the_library_writes():
    """Guards the fields that are read from tokenizer.json."""
    decoder = json.loads(LIBRARY["byte_fallback"].to_str())["decoder"]
    assert [step["type"] for step in decoder["decoders"]] == [
        "Replace", "ByteFallback", "Fuse", "Strip",
    ]  # fmt: skip
    assert decoder["decoders"][0]["pattern"] == {"String": "\u2581"}
