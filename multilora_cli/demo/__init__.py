"""The demo fleet: a 3.2 M parameter base and adapters for it, trained by tools/train_demo.py."""

from pathlib import Path

# What to ask each adapter. The models are small: they know simple sentences of some 200 words, and
# answer nonsense to greetings, questions and most other words.
DEMO_PROMPTS = {
    "law-glossary": "the PT was late on monday",
    "medicine-glossary": "the PT was late on monday",
    "pig-latin": "we opened the window on monday",
    "redact": "call me at 555 0192",
    "reverse": "we opened the window on monday",
    "roman": "meet at gate 27",
    "shipping-glossary": "the PT was late on monday",
    "upper-case": "we opened the window on monday",
}
DEMO_ADAPTERS = tuple(DEMO_PROMPTS)

_FOLDER = Path(__file__).resolve().parent


def demo_base_path() -> Path:
    """Folder of `demo:base`: config, tokenizer, chat template and bfloat16 weights."""
    return _FOLDER / "base"


def is_demo_base(folder: str | Path) -> bool:
    """Whether `folder` is that of `demo:base`, here or on the machine of a server."""
    return Path(folder).parts[-3:] == demo_base_path().parts[-3:]


def demo_adapter_path(name: str) -> Path:
    """Folder of the adapter `demo:name`; KeyError when there is none of that name."""
    if name not in DEMO_ADAPTERS:
        raise KeyError(name)
    return _FOLDER / "adapters" / name
