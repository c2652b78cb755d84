"""Decoder models and the loading of their weights."""
