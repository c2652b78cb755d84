"""The fleet file: one base model, its adapters and its limits, as frozen values."""
