"""A conversation of many turns: each sends all the turns before it, and finds them in the cache.

make up                                   # in another terminal
.venv/bin/python examples/chat.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

from meter import from_command_line

QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of them lies on the Tiber?",
    "Name a famous building there.",
    "Who built it?",
)


def main() -> None:
    meter = from_command_line()
    messages = [{"role": "system", "content": "Answer in English, in one sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = meter.ask(question[:28], messages, max_tokens=30)
        messages.append(answer)
        print(f"  {answer['content'].strip()[:90]}")
    meter.summary()


if __name__ == "__main__":
    main()
