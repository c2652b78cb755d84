"""Adapters: reading, checking, naming, and moving them between tiers."""
