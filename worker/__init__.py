"""A small paged-KV inference engine with prefix reuse, and its OpenAI-compatible server."""
