"""Exact bytes of bases, adapters and KV cache; no torch, no GPU, no weights needed."""
