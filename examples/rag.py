"""Questions about one document. The document comes first and the question last, so that all of them
share everything up to the question; the other order would share nothing.

make up                                   # in another terminal
.venv/bin/python examples/rag.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

from pathlib import Path

from meter import from_command_line

DOCUMENT = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
QUESTIONS = (
    "Which command runs the tests?",
    "Where does a new routing policy go?",
    "What must happen before a fault is fixed?",
    "How long may a function be?",
)


def main() -> None:
    meter = from_command_line()
    system = f"Answer from this document alone.\n\n{DOCUMENT.read_text()}"
    for question in QUESTIONS:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        answer = meter.ask(question[:28], messages, max_tokens=30)
        print(f"  {answer['content'].strip()[:90]}")
    meter.summary()


if __name__ == "__main__":
    main()
