"""Compiles the kernels for CPUs with the C compiler at hand, once, and checks what comes out.

The library is kept in the cache folder under the hash of everything it depends on: source,
compiler, flags, kind of CPU. Without a compiler, or if a result is off, there are no kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.nn import functional

from worker.model.cpu_chunk import ChunkKernel
from worker.model.cpu_kernels import CpuKernels, runs_of
from worker.model.cpu_native import first_largest
from worker.model.kvcache import LayerKv, LayerSpec

_HERE = Path(__file__).parent
_SOURCE, _ATTENTION = _HERE / "cpu_kernels.c", _HERE / "cpu_attention.c"
_CHUNK = _HERE / "cpu_chunk.c"
_HEADERS = (_HERE / "cpu_vec.h", _HERE / "cpu_attend.h")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 120.0
_TOLERANCE = 1e-4


class NoCpuKernels(Exception):
    """Why there are none."""


def load_cpu_kernels(folder: Path, threads: int) -> CpuKernels:
    """Compile unless ``folder`` has them, load, compare with torch. Raises ``NoCpuKernels``."""
    kernels = CpuKernels(open_library(_SOURCE, folder), open_library(_ATTENTION, folder), threads)
    _check_decode(kernels)
    _check_linear(kernels)
    chunks = ChunkKernel(open_library(_CHUNK, folder), threads)
    _check_chunk(chunks)
    if chunks.pays:
        kernels.chunks = chunks
    return kernels


def open_library(source: Path, folder: Path) -> ctypes.CDLL:
    """``source`` compiled for this CPU, kept in ``folder``. Raises ``NoCpuKernels``."""
    names = (os.environ.get("CC", ""), "cc", "clang")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise NoCpuKernels("no C compiler was found")
    try:
        return ctypes.CDLL(str(_compiled(compiler, source, folder)))
    except OSError as error:
        raise NoCpuKernels(str(error)) from error


def _compiled(compiler: str, source: Path, folder: Path) -> Path:
    """The shared library for this source, this compiler and this kind of CPU."""
    texts = (path.read_text() for path in (source, *_HEADERS))
    facts = (*texts, compiler, _version(compiler), _cpu(), " ".join(_FLAGS))
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    target = folder / f"kernels-{digest[:16]}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        # Threads of torch's own OpenMP, if it can be linked to: two of them would keep two sets.
        for extra in ([*_openmp(), "-fopenmp"], ["-fopenmp"], []):
            command = [compiler, *_FLAGS, f"-I{_HERE}", str(source), "-o", str(made), *extra, "-lm"]
            reason = _run(command, scratch)
            if reason is None:
                os.replace(made, target)  # workers that start together may both get here
                return target
    raise NoCpuKernels(f"{compiler} failed: {reason}")


def _openmp() -> list[str]:
    """The OpenMP library that comes with torch."""
    root = Path(torch.__file__).parent
    places = (root / "lib", root.with_name("torch.libs"))
    return [str(found) for place in places for found in sorted(place.glob("libgomp*.so*"))][:1]


def _run(command: list[str], scratch: str) -> str | None:
    """None if the command succeeded, else why not, in one line.

    ``scratch``: for the compiler's own files; in a container the usual place may be read-only.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMPILE_S,
            check=False,
            env={**os.environ, "TMPDIR": scratch},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def _version(compiler: str) -> str:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCpuKernels(f"{compiler}: {error}") from error
    return done.stdout


def _cpu() -> str:
    """What ``-march=native`` depends on: a folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    wanted = ("flags", "model", "cpu family", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _check_decode(kernels: CpuKernels) -> None:
    """Raises ``NoCpuKernels`` if scattered or windowed sequences come out otherwise."""
    random = torch.Generator().manual_seed(7)
    block, n_blocks, kv_heads, group = 4, 64, 2, 3
    for dim in (16, 64, 80, 128):
        spec = LayerSpec(kv_heads, dim, dim, torch.float32, None)
        keys, values = (
            torch.randn(kv_heads, n_blocks * block, dim, generator=random) for _ in range(2)
        )
        layer = LayerKv(spec, keys, values)
        order = torch.randperm(n_blocks, generator=random).tolist()
        tables = [(tuple(range(5, 40)), 137), (tuple(order[:30]), 117), ((order[31],), 1)]
        query = torch.randn(len(tables), kv_heads * group, dim, generator=random)
        for window in (None, 50):
            out = torch.empty_like(query)
            kernels.attend(query, layer, runs_of(tables, block, window), out, 0.3)
            for line, (blocks, length) in enumerate(tables):
                slots = (torch.tensor(blocks)[:, None] * block + torch.arange(block)).reshape(-1)
                slots = slots[max(0, length - (window or length)) : length]
                scores = query[line].view(kv_heads, group, dim) @ keys[:, slots].transpose(1, 2)
                wanted = (scores * 0.3).softmax(-1) @ values[:, slots]
                if not float((out[line] - wanted.view(-1, dim)).abs().max()) < _TOLERANCE:
                    raise NoCpuKernels(f"attention with heads of {dim} differs from torch's")


def _check_chunk(chunks: ChunkKernel) -> None:
    """Raises ``NoCpuKernels`` if scattered or windowed chunks come out otherwise."""
    random = torch.Generator().manual_seed(7)
    kv_heads, group, n_slots = 2, 3, 600
    for dim in (16, 64, 80, 128):
        keys, values = (torch.randn(kv_heads, n_slots, dim, generator=random) for _ in range(2))
        for rows, start, window in ((5, 0, None), (40, 250, None), (13, 300, 70), (3, 9, 2)):
            end = start + rows
            query = torch.randn(rows, kv_heads * group, dim, generator=random)
            places = torch.randperm(n_slots, generator=random)[:end]
            visible = torch.ones(rows, end, dtype=torch.bool).tril(start)
            if window is not None:
                visible &= visible.triu(start - window + 1)
            for slots in (places, slice(7, 7 + end)):
                layer = LayerKv(LayerSpec(kv_heads, dim, dim, torch.float32, window), keys, values)
                out = torch.empty_like(query)
                chunks.attend(query, layer, slots, start, out, 0.3)
                grouped = query.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
                scores = grouped @ keys[:, None, slots].transpose(2, 3) * 0.3
                weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
                wanted = (weights @ values[:, None, slots]).permute(2, 0, 1, 3).reshape_as(out)
                if not float((out - wanted).abs().max()) < _TOLERANCE:
                    raise NoCpuKernels(f"attention of chunks of {dim} differs from torch's")


def _check_linear(kernels: CpuKernels) -> None:
    """Raises ``NoCpuKernels`` if a product comes out otherwise than torch's."""
    random = torch.Generator().manual_seed(7)
    for rows, inputs, outputs in ((1, 40, 64), (2, 33, 70), (6, 64, 129), (13, 20, 16), (95, 9, 3)):
        x, weight, bias = (
            torch.randn(*shape, generator=random)
            for shape in ((rows, inputs), (outputs, inputs), (outputs,))
        )
        packed = kernels.pack(weight)
        for b in (None, bias):
            wanted = functional.linear(x, weight, b)
            made, largest = kernels.linear_largest(x, packed, b, outputs)
            if largest != first_largest(made):
                raise NoCpuKernels(f"the largest of a product of {rows} rows is found elsewhere")
            for ours in (made, kernels.linear(x, packed, b, outputs)):
                if not float((ours - wanted).abs().max()) < _TOLERANCE:
                    raise NoCpuKernels(f"a product of {rows} rows differs from torch's")
