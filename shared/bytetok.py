"""A real tokenizer without any files: one token per byte, plus the markers of a ChatML template.

The worker without torch and most tests use it: it goes through the same code as a model's own.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.bundle import TokenizerBundle

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 259

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message.tool_calls or [] %}{{ '\\n' + (call['function'] | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies, with the byte as its id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_bundle() -> TokenizerBundle:
    """Ids 0..255 are the bytes; 256..258 are <|im_start|>, <|im_end|> and <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_letters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in (IM_START, IM_END, END_OF_TEXT)
        ]
    )
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHATML,
        eos_token=IM_END,
        special_tokens={"pad_token": END_OF_TEXT},
        eos_token_ids=(257, 258),
    )
