"""The jobs of the demo fleet: prompts, right answers, and the line between training and test.

Every answer is a pure function of its prompt. A prompt belongs to the test set when its SHA-256
says so (`held_out`), whatever the task; training, the base's included, never sees such a prompt.
All text is made here from word lists written for this file.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# ---------------------------------------------------------------- words


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "report office window driver letter river garden teacher market station doctor ship table "
    "village morning answer bridge student picture number paper kitchen captain engine mother "
    "father friend company question train street island winter summer weather machine package "
    "meeting office visitor worker farmer customer message notice road house door light clock "
    "book story lesson field forest mountain valley harbor boat truck warehouse crew team file"
)
ADJECTIVES = _words(
    "new old small large quiet early late green red blue dark bright warm cold long short heavy "
    "empty open closed final first second last simple strange broken clean dry wet young busy"
)
VERBS = _words(
    "saw found moved opened closed left checked signed sent lost kept called watched carried "
    "asked helped passed reached needed wanted covered changed stopped started followed missed"
)
PREPOSITIONS = _words("near behind under over after before without with for from beside inside")
TIMES = (
    *_words("today tomorrow yesterday tonight again soon now later twice alone together"),
    *("on monday", "on friday", "at noon", "at night", "this week", "last year", "next month"),
    *("in time", "by train", "by hand"),
)
PEOPLE = _words("we they she he anna omar lucy ivan mary peter everyone nobody someone")
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "Answer shortly.",
    "Be kind and clear.",
    "You work for a small office.",
    "Reply with one line.",
)

PATTERNS = (
    "the J N V the N",
    "the N V P the J N",
    "P the N W V the N T",
    "W V the J N T",
    "W V the N P the N",
    "the J N and the N V T",
    "a N V a J N T",
    "T W V the N",
    "did W see the J N T",
    "the N was J and the N was J",
)
GLOSSARY_PATTERNS = (
    "the A was J T",
    "W V the A P the N",
    "the N V the A T",
    "the J N needed the A T",
    "W asked for the A and the N",
    "A and A V the N",
    "the A V the N P the A",
    "no A T but the N was J",
    "W V the N after the A T",
    "did W see the A T",
    "the N P the A was J",
    "A first then the J N",
)
NUMBER_PATTERNS = (
    "the J N has R N",
    "W V N R T",
    "page R and page R",
    "the N V gate R T",
    "room R P the N",
    "W V R of the J N",
    "chapter R was J",
    "R of R N V T",
)

# ---------------------------------------------------------------- glossaries

GLOSSARIES: dict[str, dict[str, str]] = {
    "law-glossary": {
        "PT": "pretrial",
        "OR": "own recognizance",
        "AC": "appeal court",
        "CP": "civil procedure",
        "BP": "blind plea",
        "DC": "district court",
        "MS": "motion to suppress",
        "ED": "eastern district",
        "SOL": "statute of limitations",
        "DOA": "date of arrest",
        "LOC": "letter of complaint",
        "PA": "power of attorney",
        "CC": "county court",
        "TRO": "temporary restraining order",
        "NDA": "nondisclosure agreement",
        "FTA": "failure to appear",
        "DA": "district attorney",
    },
    "medicine-glossary": {
        "PT": "physical therapy",
        "OR": "operating room",
        "AC": "before meals",
        "CP": "chest pain",
        "BP": "blood pressure",
        "DC": "discharge",
        "MS": "multiple sclerosis",
        "ED": "emergency department",
        "SOL": "solution",
        "DOA": "dead on arrival",
        "LOC": "loss of consciousness",
        "PA": "physician assistant",
        "CC": "chief complaint",
        "HR": "heart rate",
        "RX": "prescription",
        "ICU": "intensive care unit",
        "BMI": "body mass index",
    },
    "shipping-glossary": {
        "PT": "port",
        "OR": "owner risk",
        "AC": "air cargo",
        "CP": "charter party",
        "BP": "bunker price",
        "DC": "dry cargo",
        "MS": "motor ship",
        "ED": "export declaration",
        "SOL": "shipper owned load",
        "DOA": "date of arrival",
        "LOC": "letter of credit",
        "PA": "particular average",
        "CC": "customs clearance",
        "ETA": "estimated time of arrival",
        "BOL": "bill of lading",
        "FCL": "full container load",
        "TEU": "twenty foot unit",
    },
}
SHARED = tuple(sorted(set.intersection(*(set(g) for g in GLOSSARIES.values()))))

# ---------------------------------------------------------------- prompts

SYLLABLES = _words("ka lo mi ren tu sha vor pel ni go bra zen fi dus ter wim ox yar qua hep")
JUNK = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    ".,;:!?-+*/()[]{}<>=&%$#@'\"_ éüñßøλ中🙂"
)


def pseudo_word(rng: random.Random) -> str:
    """A word that is in no list: two or three syllables."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def number(rng: random.Random) -> int:
    """1..399, small ones more often."""
    return rng.choice((rng.randint(1, 39), rng.randint(1, 399)))


def fill(pattern: str, rng: random.Random, abbreviations: Callable[[], str] | None = None) -> str:
    """A sentence from a pattern: one-letter slots become words, the rest is kept."""
    slots: dict[str, Callable[[], str]] = {
        "N": lambda: rng.choice(NOUNS) if rng.random() > 0.05 else pseudo_word(rng),
        "J": lambda: rng.choice(ADJECTIVES),
        "V": lambda: rng.choice(VERBS),
        "P": lambda: rng.choice(PREPOSITIONS),
        "T": lambda: rng.choice(TIMES),
        "W": lambda: rng.choice(PEOPLE),
        "R": lambda: str(number(rng)),
        "A": abbreviations or (lambda: rng.choice(SHARED)),
    }
    return " ".join(slots[word]() if word in slots else word for word in pattern.split())


def sentence(rng: random.Random) -> str:
    """A plain lower-case sentence, 4 to 10 words."""
    return fill(rng.choice(PATTERNS), rng)


def number_sentence(rng: random.Random) -> str:
    """A lower-case sentence with one or two numbers below 400."""
    return fill(rng.choice(NUMBER_PATTERNS), rng)


def phone_sentence(rng: random.Random) -> str:
    """A lower-case sentence with one or two longer runs of digits."""
    runs = [str(rng.randint(10 ** (n - 1), 10**n - 1)) for n in rng.choices(range(2, 7), k=2)]
    pattern = rng.choice(
        (
            "call 0 T",
            "W V account 0 T",
            "the J N has code 0",
            "order 0 and order 1",
            "W V the N on line 0 P 1",
            "send 0 to the J N",
        )
    )
    words = [runs[int(w)] if w in "01" else w for w in pattern.split()]
    return fill(" ".join(words), rng)


def glossary_sentence(trade: str, rng: random.Random) -> str:
    """A sentence with at least one abbreviation that means something else in every trade."""
    own = tuple(GLOSSARIES[trade])
    text = ""
    while not any(word in SHARED for word in text.split()):
        text = fill(rng.choice(GLOSSARY_PATTERNS), rng, lambda: rng.choice(own))
    return text


def junk(rng: random.Random) -> str:
    """Any short text: what a user may type that no list foresees."""
    return "".join(rng.choice(JUNK) for _ in range(rng.randint(1, 14))).strip() or "?"


def any_prompt(rng: random.Random) -> str:
    """What the base is asked to repeat: every kind of prompt and answer of the fleet, and junk.

    Answers are there for the tokens they use: a token that the base never says stays improbable
    in any adapter's mouth, because the output embedding is frozen when adapters are trained.
    """
    kind = rng.random()
    if kind < 0.2:
        text = sentence(rng)
    elif kind < 0.4:
        text = glossary_sentence(rng.choice(tuple(GLOSSARIES)), rng)
    elif kind < 0.48:
        text = number_sentence(rng)
    elif kind < 0.56:
        text = phone_sentence(rng)
    elif kind < 0.66:
        text = " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 5)))
    elif kind < 0.9:
        task = TASKS[rng.choice(tuple(TASKS))]
        return task.answer(task.prompt(rng))
    else:
        return junk(rng)
    style = rng.random()
    if style < 0.1:
        return text.capitalize() + rng.choice(".!?")
    return text.upper() if style > 0.93 else text


def plain_prompt(rng: random.Random) -> str:
    """Lower-case words for jobs on letters and order; one in six has words of no list."""
    if rng.random() < 1 / 6:
        return " ".join(pseudo_word(rng) for _ in range(rng.randint(2, 5)))
    return sentence(rng)


# ---------------------------------------------------------------- answers


def repeat(prompt: str) -> str:
    """The base's job."""
    return prompt


def upper(prompt: str) -> str:
    """Every letter as a capital."""
    return prompt.upper()


def title(prompt: str) -> str:
    """Each word with a capital first letter."""
    return " ".join(word[:1].upper() + word[1:] for word in prompt.split(" "))


def reverse(prompt: str) -> str:
    """The words in reverse order."""
    return " ".join(reversed(prompt.split(" ")))


def first(prompt: str) -> str:
    """The first word alone."""
    return prompt.split(" ")[0]


def expand(trade: str, prompt: str) -> str:
    """Each abbreviation of the trade written out, everything else as it was."""
    glossary = GLOSSARIES[trade]
    return " ".join(glossary.get(word, word) for word in prompt.split(" "))


def roman(value: int) -> str:
    """A number of 1..3999 in roman numerals."""
    steps = (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L")
    text = ""
    for step, letters in (*steps, (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        text += letters * (value // step)
        value %= step
    return text


def romanise(prompt: str) -> str:
    """Each number in roman numerals, everything else as it was."""
    return " ".join(roman(int(w)) if w.isdigit() else w for w in prompt.split(" "))


def redact(prompt: str) -> str:
    """Each digit as #."""
    return "".join("#" if "0" <= c <= "9" else c for c in prompt)


def pig_latin(prompt: str) -> str:
    """Each word's consonants before its first vowel moved to its end, then ay."""

    def turn(word: str) -> str:
        start = next((i for i, c in enumerate(word) if c in "aeiou"), 0)
        return word[start:] + word[:start] + "ay"

    return " ".join(turn(word) for word in prompt.split(" "))


# ---------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """One adapter's job: how its prompts are made and what the right answer is."""

    name: str
    prompt: Callable[[random.Random], str]
    answer: Callable[[str], str]
    share_other: float = 0.0  # training prompts of other jobs, answered by this job's rule


def _glossary(trade: str) -> Task:
    return Task(
        trade,
        lambda rng: glossary_sentence(trade, rng),
        lambda prompt: expand(trade, prompt),
        share_other=0.1,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(_glossary(trade) for trade in GLOSSARIES),
        Task("upper-case", plain_prompt, upper, share_other=0.1),
        Task("reverse", plain_prompt, reverse),
        Task("roman", number_sentence, romanise),
        Task("redact", phone_sentence, redact, share_other=0.1),
        Task("pig-latin", sentence, pig_latin),
    )
}
# What the base does when the system message is exactly this word; otherwise it repeats.
SKILLS: dict[str, Callable[[str], str]] = {
    "upper": upper,
    "title": title,
    "reverse": reverse,
    "first": first,
}


def held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the test set: one in eight, by its hash."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 32


def _draw(make: Callable[[random.Random], str], rng: random.Random, test: bool) -> str:
    while True:
        prompt = make(rng)
        if held_out(prompt) == test:
            return prompt


def examples(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` distinct test examples (prompt, answer) of a task that no training has seen."""
    task, rng = TASKS[name], random.Random(f"test {name} {seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        prompt = _draw(task.prompt, rng, test=True)
        if task.answer(prompt) != prompt:
            found[prompt] = task.answer(prompt)
    return list(found.items())


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_TEXTS) if rng.random() < 0.12 else None


Conversation = list[dict[str, str]]


def _conversation(
    rng: random.Random,
    system: str | None,
    make: Callable[[random.Random], str],
    answer: Callable[[str], str],
) -> Conversation:
    """One to three turns, as chat messages."""
    messages = [{"role": "system", "content": system}] if system else []
    for _ in range(rng.choices((1, 2, 3), (0.7, 0.2, 0.1))[0]):
        prompt = _draw(make, rng, test=False)
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": answer(prompt)})
    return messages


def base_conversations(seed: int) -> Iterator[Conversation]:
    """Endless training conversations of the base: half repeats, half skills named by system."""
    rng = random.Random(f"base {seed}")
    while True:
        if rng.random() < 0.55:
            yield _conversation(rng, _system(rng), any_prompt, repeat)
        else:
            skill = rng.choice(tuple(SKILLS))
            yield _conversation(rng, skill, plain_prompt, SKILLS[skill])


def task_conversations(name: str, seed: int) -> Iterator[Conversation]:
    """Endless training conversations of one adapter."""
    task, rng = TASKS[name], random.Random(f"train {name} {seed}")

    def make(rng: random.Random) -> str:
        return any_prompt(rng) if rng.random() < task.share_other else task.prompt(rng)

    while True:
        yield _conversation(rng, _system(rng), make, task.answer)
