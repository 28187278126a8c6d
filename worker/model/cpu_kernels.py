"""The worker's kernels for CPUs: ``cpu_kernels.c``, compiled once by the C compiler at hand.

torch is built for large products. A decoding step multiplies few rows with all weights and attends
with one query a sequence: torch reads memory at half its speed then, and costs a call a sequence
and layer. The kernels read at nearly the speed of memory, scattered KV blocks in place (ADR 9).
Without a compiler, or if a result is off, torch's own functions serve, and the log says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.model.kvcache import LayerKv, LayerSpec

_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 120.0
_LANE, _MOST_DIM, _MOST_GROUP = 16, 256, 8
_TOLERANCE = 1e-4


class NoCpuKernels(Exception):
    """Why there are none."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Where KV of some sequences lies: sequence ``s`` owns runs ``first[s] .. first[s+1]``."""

    slots: Tensor
    """int64 ``[runs, 2]``: first slot and length."""
    first: Tensor
    """int64 ``[sequences + 1]``"""


class CpuKernels:
    """Typed calls into the compiled library. Thread-safe; ``threads`` share the work of a call."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        pointer, number, threaded = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._decode = library.headwater_decode
        self._decode.argtypes = [
            *(pointer, number, pointer, pointer, number, pointer, pointer, pointer),
            *([number] * 5),
            *(ctypes.c_float, threaded),
        ]
        self._decode.restype = ctypes.c_int
        self._linear = library.headwater_linear
        self._linear.argtypes = [pointer, number, *([pointer] * 3), *([number] * 3), threaded]
        self._linear.restype = None
        self._pack = library.headwater_pack
        self._pack.argtypes, self._pack.restype = [pointer, pointer, number, number], None
        library.headwater_panel.restype = number
        self._panel: int = library.headwater_panel()
        self._threads = threads

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` ``[outputs, inputs]``, float32, in the form that :meth:`linear` reads."""
        outputs, inputs = weight.shape
        plain = weight.contiguous()
        packed = torch.empty(-(-outputs // self._panel) * self._panel * inputs)
        self._pack(plain.data_ptr(), packed.data_ptr(), outputs, inputs)
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """``x @ weight.T + bias``: ``[..., inputs]`` float32 to ``[..., outputs]``."""
        inputs = x.shape[-1]
        rows = x.reshape(-1, inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(*x.shape[:-1], outputs)
        self._linear(
            rows.data_ptr(),
            rows.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            len(rows),
            outputs,
            inputs,
            self._threads,
        )
        return out

    @staticmethod
    def decodes(spec: LayerSpec, query_heads: int) -> bool:
        """Whether a layer's shapes are compiled in."""
        return (
            spec.dtype == torch.float32
            and spec.key_dim == spec.value_dim <= _MOST_DIM
            and spec.key_dim % _LANE == 0
            and not spec.capped
            and query_heads // spec.kv_heads <= _MOST_GROUP
        )

    def attend(self, query: Tensor, layer: LayerKv, runs: Runs, out: Tensor, scale: float) -> None:
        """``query`` and ``out`` ``[n, Hq, D]``, each row in one piece."""
        n, heads, dim = query.shape
        kv_heads, slots, _ = layer.keys.shape
        if query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        failed = self._decode(
            query.data_ptr(),
            query.stride(0),
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            slots,
            runs.slots.data_ptr(),
            runs.first.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            n,
            kv_heads,
            heads // kv_heads,
            dim,
            scale,
            self._threads,
        )
        if failed:
            raise RuntimeError(f"the decode kernel does not take {heads} heads of {dim}")


def runs_of(tables: list[tuple[tuple[int, ...], int]], block_size: int, window: int | None) -> Runs:
    """Runs of consecutive slots of each sequence's ``(blocks, length)``, seen through a window."""
    parts: list[np.ndarray] = []
    first = [0]
    for blocks, length in tables:
        begin = 0 if window is None else max(0, length - window)
        used = np.array(blocks[begin // block_size : -(-length // block_size)], dtype=np.int64)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(used) != 1) + 1))
        part = np.empty((len(starts), 2), dtype=np.int64)
        part[:, 0] = used[starts] * block_size
        part[:, 1] = np.diff(starts, append=len(used)) * block_size
        part[-1, 1] -= -length % block_size
        part[0] += (begin % block_size, -(begin % block_size))
        parts.append(part)
        first.append(first[-1] + len(part))
    return Runs(torch.from_numpy(np.concatenate(parts)), torch.tensor(first))


def load_cpu_kernels(folder: Path, threads: int) -> CpuKernels:
    """Compile unless ``folder`` has them, load, compare with torch. Raises ``NoCpuKernels``."""
    names = (os.environ.get("CC", ""), "cc", "clang")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise NoCpuKernels("no C compiler was found")
    try:
        library = ctypes.CDLL(str(_compiled(compiler, folder)))
    except OSError as error:
        raise NoCpuKernels(str(error)) from error
    kernels = CpuKernels(library, threads)
    _check_decode(kernels)
    _check_linear(kernels)
    return kernels


def _compiled(compiler: str, folder: Path) -> Path:
    """The shared library for this source, this compiler and this kind of CPU."""
    facts = (_SOURCE.read_text(), compiler, _version(compiler), _cpu(), " ".join(_FLAGS))
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    target = folder / f"kernels-{digest[:16]}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        # Threads of torch's own OpenMP, if it can be linked to: two of them would keep two sets.
        for extra in ([*_openmp(), "-fopenmp"], ["-fopenmp"], []):
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made), *extra, "-lm"]
            reason = _run(command)
            if reason is None:
                os.replace(made, target)  # workers that start together may both get here
                return target
    raise NoCpuKernels(f"{compiler} failed: {reason}")


def _openmp() -> list[str]:
    """The OpenMP library that comes with torch."""
    root = Path(torch.__file__).parent
    places = (root / "lib", root.with_name("torch.libs"))
    return [str(found) for place in places for found in sorted(place.glob("libgomp*.so*"))][:1]


def _run(command: list[str]) -> str | None:
    """None if the command succeeded, else why not, in one line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_S, check=False
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
            if not float((kernels.linear(x, packed, b, outputs) - wanted).abs().max()) < _TOLERANCE:
                raise NoCpuKernels(f"a product of {rows} rows differs from torch's")
