"""A small paged-KV inference engine with automatic prefix reuse, and its OpenAI-compatible server."""
