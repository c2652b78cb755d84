"""Triton kernels for multi-LoRA serving. Importing this package does nothing heavy."""
