"""The demo fleet: a 3.2 M parameter base and adapters for it, trained by tools/train_demo.py."""

from pathlib import Path

DEMO_ADAPTERS = (
    "law-glossary",
    "medicine-glossary",
    "pig-latin",
    "redact",
    "reverse",
    "roman",
    "shipping-glossary",
    "upper-case",
)

_FOLDER = Path(__file__).resolve().parent


def demo_base_path() -> Path:
    """Folder of `demo:base`: config, tokenizer, chat template and bfloat16 weights."""
    return _FOLDER / "base"


def demo_adapter_path(name: str) -> Path:
    """Folder of the adapter `demo:name`; KeyError when there is none of that name."""
    if name not in DEMO_ADAPTERS:
        raise KeyError(name)
    return _FOLDER / "adapters" / name
