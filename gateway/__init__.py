"""The prefix-aware gateway: one OpenAI-compatible endpoint in front of many workers."""
