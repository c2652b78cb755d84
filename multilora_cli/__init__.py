"""mlora: one base model and thousands of LoRA adapters on one machine."""

__version__ = "0.1.0"
