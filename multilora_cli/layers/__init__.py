"""The layers of a decoder, LoRA written in."""
