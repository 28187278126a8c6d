"""Our text and tokens are those of transformers, for templates of the great families (case B14)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shared.blocks import Scope, chain_keys, unpack_tokens
from shared.bundle import TokenizerBundle
from shared.openai import GenerateRequest, RouteKind, parse
from shared.render import Renderer

pytestmark = pytest.mark.torch

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # noqa: E501 - a line of a template

LLAMA3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'\
+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}\
{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}{% else %}\
{% set first = '' %}{% set rest = messages %}{% endif %}{% for message in rest %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}{% generation %}\
{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message['content'] | trim + \
'<end_of_turn>\n' }}{% endgeneration %}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
)
TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN_TOOLS,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))",
    "Ünïcödé 你好，世界 🌍 naïve café — “quotes”",
]
WORDS = [
    *("hello", "It's", "  two", "trailing  ", "\n", "\n\n", "é", "e\u0301", "你好", "🌍", "42"),
    *("<|im_end|>", "<|im_", "[INST]", "</s>", "<s>", "|", "{{ x }}", '"q"', "\\n", "\t"),
    *("👩\u200d🚀", "العربية"),
]


def trained() -> Tokenizer:
    """A byte-level BPE with a few hundred merges and the markers of all templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


TOKENIZER_JSON = trained().to_str()


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Renderer]:
    """transformers' tokenizer and our renderer for one template."""
    from transformers import PreTrainedTokenizerFast

    template = TEMPLATES[request.param]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(TOKENIZER_JSON),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    bundle = TokenizerBundle(TOKENIZER_JSON, template, "<s>", "</s>", add_bos=True)
    return reference, Renderer(bundle, check_every=1, background=lambda work: work())


def chat(messages: list[dict[str, Any]], **fields: Any) -> GenerateRequest:
    return parse(RouteKind.CHAT, json.dumps({"messages": messages, **fields}).encode())


def random_chat(rng: random.Random) -> list[dict[str, Any]]:
    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(0, 12)))

    messages = [{"role": "system", "content": rng.choice(["", "Be brief.", text()])}]
    messages = messages if rng.random() < 0.6 else []
    for _ in range(rng.randint(1, 5)):
        messages += [
            {"role": "user", "content": text()},
            {"role": "assistant", "content": text()},
        ]
    return messages[: -1 if rng.random() < 0.8 else None]


def expected(
    reference: Any, messages: list[dict[str, Any]], **options: Any
) -> tuple[str, list[int]]:
    text = reference.apply_chat_template(messages, tokenize=False, **options)
    return text, reference.encode(text, add_special_tokens=False)


def test_a_hundred_random_chats(pair: tuple[Any, Renderer]) -> None:
    reference, renderer = pair
    rng = random.Random(11)
    root = Scope("m", "t").root(b"key")
    for index in range(100):
        messages = random_chat(rng)
        prompted = rng.random() < 0.7
        request = chat(messages, add_generation_prompt=prompted)
        text, tokens = expected(reference, messages, add_generation_prompt=prompted)
        assert renderer.render_chat(request) == text
        chain = renderer.chain(request, root)
        assert list(unpack_tokens(chain.token_bytes)) == tokens, index
        assert chain.n_tokens == len(tokens)
        assert chain.keys == chain_keys(root, tokens)
        assert renderer.encode_request(request).tokens == tokens
    stats = renderer.stats()
    assert stats.cutting
    assert stats.checks > 50
    assert stats.mismatches == 0


TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "It's <b>é</b>", "parameters": {"z": 1, "a": {"type": "null"}}
}}]  # fmt: skip


def test_tools_calls_and_answers(pair: tuple[Any, Renderer]) -> None:
    reference, renderer = pair
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"at": "é"}},
    }
    sent = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    as_text = json.loads(json.dumps(sent))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"at": "é"}'
    text, tokens = expected(reference, sent, tools=TOOLS, add_generation_prompt=True)
    request = chat(as_text, tools=TOOLS)
    assert renderer.render_chat(request) == text
    assert renderer.encode_request(request).tokens == tokens


def test_continuing_the_last_message(pair: tuple[Any, Renderer]) -> None:
    reference, renderer = pair
    for ending in ("The capital is", "with space  ", "a\n"):
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": ending}]
        text, _ = expected(reference, messages, continue_final_message=True)
        assert renderer.render_chat(chat(messages, continue_final_message=True)) == text


def test_plain_prompts_get_one_bos(pair: tuple[Any, Renderer]) -> None:
    reference, renderer = pair
    for text in ("", "hello", "It's 42\n<|im_end|>x", "<s>given"):
        body = json.dumps({"prompt": text}).encode()
        request = parse(RouteKind.COMPLETIONS, body)
        assert renderer.encode_request(request).tokens == reference.encode(text)
        assert renderer.encode_text(text) == reference.encode(text)
        plain = reference.encode(text, add_special_tokens=False)
        assert renderer.encode_text(text, add_special_tokens=False) == plain


def test_long_pieces_too(pair: tuple[Any, Renderer]) -> None:
    reference, renderer = pair
    rng = random.Random(3)
    messages = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=20)) + "It's 42 é" * 700}]
    _, tokens = expected(reference, messages, add_generation_prompt=True)
    assert renderer.encode_request(chat(messages)).tokens == tokens


def test_reasoning_and_special_tokens_reach_the_template() -> None:
    from transformers import PreTrainedTokenizerFast

    template = (
        "{{ bos_token }}{{ pad_token }}\n    {% if true %}\n  x\n  {% endif %}\n"
        "{% for m in messages %}"
        "{{ m.reasoning_content | default('-') }}{{ m.thinking | default('-') }}"
        "{{ m.name | default('?') }}{{ m.content }}{% if mood is defined %}{{ mood }}{% endif %}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ documents }}"
        "{{ namespace(a=1).a }}{{ dict(a=1) | tojson }}"
        "{{ {'b': 'é<', 'a': [1]} | tojson(indent=2) }}"
    )
    tokenizer = Tokenizer.from_str(TOKENIZER_JSON)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="</s>", chat_template=template
    )
    bundle = TokenizerBundle(TOKENIZER_JSON, template, "<s>", special_tokens={"pad_token": "</s>"})
    messages = [
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": "b", "reasoning": "why"},
        {"role": "user", "content": "c", "name": None},
        {"role": "user", "content": "never"},
    ]
    documents = [{"title": "t", "text": "x"}]
    request = chat(messages, documents=documents, chat_template_kwargs={"mood": "calm"})
    text = reference.apply_chat_template(
        messages, tokenize=False, documents=documents, mood="calm", add_generation_prompt=True
    )
    assert Renderer(bundle).render_chat(request) == text
