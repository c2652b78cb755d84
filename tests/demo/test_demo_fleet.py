"""The demo fleet in our engine: every adapter does its own job, all of them in one batch."""

import random
from collections.abc import Callable

import pytest
from demo_tasks import SKILLS, TASKS, any_prompt, examples, held_out, plain_prompt

from multilora_cli.demo import DEMO_ADAPTERS, DEMO_PROMPTS, demo_adapter_path, demo_base_path
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.text.chat_template import (
    ChatTemplate,
    read_template_source,
    read_tokenizer_config,
    special_names,
)
from multilora_cli.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.engine_kit import Rig, adapter_ref

PER_TASK = 8
PAGE = 16 * 2 * 5 * 4 * 32 * 4  # bytes of float32 K and V of 16 tokens: 5 layers, 4 heads of 32
END = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo_base_path())


@pytest.fixture(scope="module")
def refs() -> dict[str, AdapterRef]:
    return {n: adapter_ref(demo_base_path(), demo_adapter_path(n), n) for n in DEMO_ADAPTERS}


def chat(tokenizer: Tokenizer, *messages: tuple[str, str]) -> list[int]:
    """Token ids of a conversation, ready for the next answer."""
    config = read_tokenizer_config(demo_base_path())
    source = read_template_source(demo_base_path(), config)
    assert source is not None
    template = ChatTemplate(source, special_names(config), ["<|begin|>", "<|end|>"])
    segments = template.render([{"role": role, "content": text} for role, text in messages])
    return tokenizer.encode_segments(segments, add_special=False)


def test_adapters_mixed_in_one_batch_do_their_own_jobs(
    tokenizer: Tokenizer, refs: dict[str, AdapterRef]
) -> None:
    """Own adapter at least 95 % of unseen examples, the base and the next adapter at most 5 %."""
    rig = Rig(
        demo_base_path(), pages=1024, page=PAGE, dtype="float32", max_num_seqs=64, debug=False
    )
    names = list(DEMO_ADAPTERS)
    asked = []
    for index in range(PER_TASK):
        for at, name in enumerate(names):
            prompt, answer = examples(name, PER_TASK, seed=11)[index]
            ids = chat(tokenizer, ("user", prompt))
            other = (None, names[(at + 1 + index % (len(names) - 1)) % len(names)])[index % 2]
            for used in (name, other):
                ref = refs[used] if used else None
                request = rig.submit(ids, ref, max_tokens=48, stop_token_ids=(END,))
                asked.append((request, name, used, prompt, answer))
    rig.run()
    own, cross = 0, 0
    for request, name, used, _, answer in asked:
        text = tokenizer.decode(rig.answer(request).tokens, skip_special=True)
        own += used == name and text == answer
        cross += used != name and text == answer
    total = PER_TASK * len(TASKS)
    assert own >= 0.95 * total
    assert cross <= 0.05 * total


def test_what_a_person_is_told_to_try_is_answered_right(
    tokenizer: Tokenizer, refs: dict[str, AdapterRef]
) -> None:
    """By each adapter, and repeated by the base."""
    rig = Rig(demo_base_path(), pages=512, page=PAGE, dtype="float32", debug=False)
    asked = []
    for name, prompt in DEMO_PROMPTS.items():
        ids = chat(tokenizer, ("user", prompt))
        for ref, answer in ((refs[name], TASKS[name].answer(prompt)), (None, prompt)):
            request = rig.submit(ids, ref, max_tokens=48, stop_token_ids=(END,))
            asked.append((request, answer))
    rig.run()
    for request, answer in asked:
        assert tokenizer.decode(rig.answer(request).tokens, skip_special=True) == answer


def unseen(make: Callable[[random.Random], str], count: int) -> list[str]:
    """Prompts of a generator that no training has seen, seed 23."""
    rng = random.Random(23)
    drawn = (make(rng) for _ in range(100 * count))
    return [prompt for prompt in drawn if held_out(prompt)][:count]


def test_the_base_repeats_and_obeys_its_system_message(tokenizer: Tokenizer) -> None:
    """19 of 20 right, over one turn and two, with a system message that says nothing and four
    that name a skill."""
    rig = Rig(demo_base_path(), pages=512, page=PAGE, dtype="float32", max_num_seqs=64)
    cases: dict[int, str] = {}

    def ask(answer: str, *messages: tuple[str, str]) -> None:
        ids = chat(tokenizer, *messages)
        cases[rig.submit(ids, max_tokens=48, stop_token_ids=(END,))] = answer

    for prompt in unseen(any_prompt, 12):
        ask(prompt, ("user", prompt))
        ask(prompt, ("user", "hello"), ("assistant", "hello"), ("user", prompt))
        ask(prompt, ("system", "Answer shortly."), ("user", prompt))
    for skill, answer in SKILLS.items():
        for prompt in unseen(plain_prompt, 6):
            ask(answer(prompt), ("system", skill), ("user", prompt))
    rig.run()
    texts = {i: tokenizer.decode(rig.answer(i).tokens, skip_special=True) for i in cases}
    right = sum(texts[request] == answer for request, answer in cases.items())
    assert right >= 0.95 * len(cases)


def test_only_the_last_turn_is_read(tokenizer: Tokenizer) -> None:
    """A chat that changed its adapter on the way does not confuse the next answer."""
    before = ("user", "one"), ("assistant", "ONE"), ("user", "two"), ("assistant", "II")
    assert chat(tokenizer, *before, ("user", "last")) == chat(tokenizer, ("user", "last"))
    with_system = chat(tokenizer, ("system", "upper"), ("user", "last"))
    assert chat(tokenizer, ("system", "upper"), *before, ("user", "last")) == with_system
    unfinished = ("user", "last"), ("assistant", "LA")
    assert chat(tokenizer, *before, *unfinished) == chat(tokenizer, *unfinished)


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in ("naïve 🙂 中文\t\n  x", "\x00\x7f", "0123 #### <b>", "a" * 500):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
