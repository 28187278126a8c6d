"""A batch with the same examples before each input. One request goes first and fills the cache;
the others follow together and are served from it.

make up                                   # in another terminal
.venv/bin/python examples/fewshot.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from meter import Meter, from_command_line

SHOTS = (
    ("The soup was cold and the waiter rude.", "negative"),
    ("Best bread in town, we come every week.", "positive"),
    ("It is open from nine to five.", "neutral"),
    ("I waited an hour and left hungry.", "negative"),
    ("A lovely garden and a kind host.", "positive"),
    ("They take cash and cards.", "neutral"),
)
INPUTS = (
    "The cake was dry.",
    "What a view, and what a wine!",
    "There are forty seats.",
    "Never again.",
    "The children loved it.",
    "It lies behind the station.",
    "Too loud to talk.",
    "They remembered our names.",
)


def classify(meter: Meter, text: str) -> None:
    """One input behind the same beginning as all the others."""
    messages = [{"role": "system", "content": "Say how a review feels, in one word."}]
    for review, label in SHOTS:
        messages += [
            {"role": "user", "content": review},
            {"role": "assistant", "content": label},
        ]
    messages.append({"role": "user", "content": text})
    answer = meter.ask(text[:28], messages, max_tokens=4)
    print(f"  {text} -> {answer['content'].strip()[:20]}")


def main() -> None:
    meter = from_command_line()
    first, *others = INPUTS
    classify(meter, first)
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(lambda text: classify(meter, text), others))
    meter.summary()


if __name__ == "__main__":
    main()
