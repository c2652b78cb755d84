"""The page pool that KV cache and adapters share, and who owns which page."""
