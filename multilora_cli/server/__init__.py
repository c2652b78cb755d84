"""The front process: OpenAI-compatible HTTP, keys, text, and one client of the engine."""
