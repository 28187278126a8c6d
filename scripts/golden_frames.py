"""Event frames made by the engines' own encoder classes, and the names of their metrics.

    python scripts/golden_frames.py CACHE_FOLDER [OUTPUT_FOLDER]

The released wheels are downloaded with pip and never installed: only the struct definitions of
``kv_events.py`` are taken out of them (by their syntax tree) and run with msgspec, and only the
metric names are read out of the sources. Each fixture records package, version, file and SHA-256.
"""

from __future__ import annotations

import ast
import enum
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Literal, Optional, Union

import msgspec

VERSIONS = {"vllm": ("0.11.2", "0.23.0", "0.33.0"), "sglang": ("0.5.16", "0.5.23")}
EVENTS = {
    "vllm": "vllm/distributed/kv_events.py",
    "sglang": "sglang/srt/disaggregation/kv_events.py",
}
METRICS = {
    "vllm": ("vllm/v1/metrics/loggers.py",),
    "sglang": (
        "sglang/srt/observability/metrics_collector.py",
        "sglang/srt/metrics/collector.py",
    ),
}
WANTED = {"EventBatch", "KVCacheEvent", "StorageMedium", "BlockStored", "BlockRemoved"}
WANTED |= {"AllBlocksCleared", "KVEventBatch"}
DIGEST = bytes(range(32))


def wheel(package: str, version: str, cache: Path) -> Path:
    """The released wheel, downloaded once."""
    found = sorted(cache.glob(f"{package}-{version}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "-d", str(cache), f"{package}=={version}"]
        subprocess.run(command, check=True)
        found = sorted(cache.glob(f"{package}-{version}-*.whl"))
    return found[0]


def structs(source: str) -> dict[str, Any]:
    """The event classes, without anything around them."""
    tree = ast.parse(source)
    body: list[ast.stmt] = [
        node
        for node in tree.body
        if (isinstance(node, ast.ClassDef) and node.name in WANTED)
        or (isinstance(node, ast.Assign) and "MEDIUM" in ast.unparse(node.targets[0]))
    ]
    space: dict[str, Any] = {"msgspec": msgspec, "enum": enum, "Any": Any, "Literal": Literal}
    space |= {"Optional": Optional, "Union": Union, "ExternalBlockHash": bytes | int}
    space["__name__"] = "golden"
    sys.modules.setdefault("golden", type(sys)("golden"))
    sys.modules["golden"].__dict__.update(space)
    code = compile(ast.Module(body, []), "kv_events.py", "exec")
    exec(code, sys.modules["golden"].__dict__)
    return dict(sys.modules["golden"].__dict__)


def make(kind: Any, **values: Any) -> Any:
    """An event with those of ``values`` that its class has; fields without a default get None."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    given = {name: value for name, value in values.items() if name in fields}
    for name, field in fields.items():
        if field.required:
            given.setdefault(name, None)
    return kind(**given)


def cases(engine: str, space: dict[str, Any]) -> dict[str, list[Any]]:
    """Batches of events by name."""
    names = {f.name for f in msgspec.structs.fields(space["BlockStored"])}

    def stored(first: int, n: int, **more: Any) -> Any:
        values = {
            "block_hashes": [1000 + i if engine == "vllm" else -1000 - i for i in range(first, n)],
            "parent_block_hash": None,
            "token_ids": list(range(first * 16, n * 16)),
            "block_size": 16,
            "medium": "GPU",
            **more,
        }
        return make(space["BlockStored"], **values)

    sign = 1 if engine == "vllm" else -1
    removed = make(space["BlockRemoved"], block_hashes=[sign * 1001], medium="GPU")
    found = {
        "chain": [stored(0, 2), stored(2, 3, parent_block_hash=sign * 1001)],
        "removed": [stored(0, 2), removed],
        "cleared": [stored(0, 2), space["AllBlocksCleared"](), stored(0, 1)],
        "host": [stored(0, 2, medium="CPU" if engine == "vllm" else "CPU_PINNED")],
    }
    if engine == "vllm":
        found["digests"] = [
            stored(0, 1, block_hashes=[DIGEST]),
            stored(1, 2, parent_block_hash=DIGEST),
        ]
    if "extra_keys" in names:
        found["salt"] = [stored(0, 2, extra_keys=[("pepper",), None])]
        found["adapter"] = [
            stored(0, 2, lora_id=1, lora_name="poet", extra_keys=[("poet",), ("poet",)])
        ]
        found["picture"] = [stored(0, 2, extra_keys=[None, (("picture", 3),)])]
        found["groups"] = [
            stored(0, 2, group_idx=0, kv_cache_spec_kind="sliding_window"),
            stored(0, 2, group_idx=1, kv_cache_spec_kind="full_attention"),
        ]
    if "cache_salt" in names:
        found["salt"] = [stored(0, 2, cache_salt="pepper", session_id="s")]
    if "lora_name" in names and engine == "sglang":
        found["adapter"] = [stored(0, 2, lora_id=1, lora_name="poet")]
    return found


def fixture(engine: str, version: str, cache: Path) -> dict[str, Any]:
    """Everything that is recorded of one release."""
    path = wheel(engine, version, cache)
    with zipfile.ZipFile(path) as archive:
        members = set(archive.namelist())
        source = archive.read(EVENTS[engine]).decode()
        texts = [archive.read(name).decode() for name in METRICS[engine] if name in members]
    space = structs(source)
    encode = msgspec.msgpack.Encoder().encode
    frames = {}
    for name, events in cases(engine, space).items():
        batch = space["KVEventBatch"](ts=1.5, events=events)
        if name == "chain":
            rank = "data_parallel_rank" if engine == "vllm" else "attn_dp_rank"
            setattr(batch, rank, 0)
        frames[name] = encode(batch).hex()
    metrics = {found for text in texts for found in re.findall(rf"\b{engine}:[a-z0-9_]+", text)}
    return {
        "engine": engine,
        "version": version,
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source": EVENTS[engine],
        "frames": frames,
        "metrics": sorted(metrics),
    }


def main(cache: Path, output: Path) -> None:
    """Write one fixture per release."""
    cache.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    for engine, versions in VERSIONS.items():
        for version in versions:
            made = fixture(engine, version, cache)
            place = output / f"{engine}-{version}.json"
            place.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            print(place, made["sha256"])  # noqa: T201 - says what it wrote


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[1] / "tests" / "gateway" / "golden"
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else default)
