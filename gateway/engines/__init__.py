"""Engines of other makes: pure translators between their wire formats and ours.

catalogue   which engines there are, and which one an address is
vllm, sglang, llamacpp, tgi, openai, native      one engine each
frames      event frames of vLLM and SGLang -> plain events
keymap      the engine's block ids and sizes -> our index keys
continuity  what a sequence number means: next, hole, old news, another incarnation
"""
