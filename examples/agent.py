"""An agent with tools: instructions, tools and all that was done before are sent with every step.

The steps say which tool to call, since a small model seldom chooses well; what it is called with is
the model's own, and the worker holds it to the tool's schema.

make up                                   # in another terminal
.venv/bin/python examples/agent.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import json
from typing import Any

from meter import from_command_line

CITIES = ["Paris", "Rome", "Oslo"]


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    """A function in the form of the OpenAI API."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    tool("weather", "The weather in a city now.", city={"enum": CITIES}),
    tool("book", "Book a table outside.", city={"enum": CITIES}, seats={"enum": [2, 4]}),
]


def use(name: str, text: str) -> dict[str, Any]:
    """What the tool gives back; a model may have been cut off in the middle of its arguments."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        return {"error": f"the arguments are no JSON: {error}"}
    if name == "weather":
        return {"city": arguments["city"], "sky": "clear", "celsius": 24}
    return {"booked": True, **arguments}


def main() -> None:
    meter = from_command_line()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You plan dinners. Look at the weather before you book."},
        {"role": "user", "content": "A table for two in Rome tonight, outside if it is warm."},
    ]
    for step in ("weather", "book"):
        choice = {"type": "function", "function": {"name": step}}
        answer = meter.ask(step, messages, tools=TOOLS, tool_choice=choice, max_tokens=120)
        messages.append(answer)
        for call in answer["tool_calls"]:
            asked = call["function"]
            result = use(asked["name"], asked["arguments"])
            print(f"  {asked['name']}({asked['arguments'].strip()}) -> {result}")
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
            )
    answer = meter.ask("answer", messages, tools=TOOLS, tool_choice="none", max_tokens=40)
    print(f"  {answer['content'].strip()[:90]}")
    meter.summary()


if __name__ == "__main__":
    main()
