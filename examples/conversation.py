"""Two turns of a conversation with the official client; shows what each turn found in the cache.

make up                                   # in another terminal
.venv/bin/python examples/conversation.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    """Ask twice, print answer, worker and cached tokens of each turn."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = next(iter(client.models.list())).id
    messages: list[dict[str, str]] = []
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=40, temperature=0
        )
        answer = raw.parse()
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        usage = answer.usage
        print(f"{question}\n  {text}")
        print(
            f"  worker {raw.headers['x-headwater-worker']}: {usage.prompt_tokens} prompt tokens, "
            f"{usage.prompt_tokens_details.cached_tokens} of them cached"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
