"""The worker's own int8 kernel sums exactly; without the instructions for it the log says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from worker.config import ModelConfig
from worker.model import cpu_int8
from worker.model.cpu_compile import NoCpuKernels
from worker.model.cpu_int8 import Int8Kernel, load_int8_kernel
from worker.model.speedups import with_cpu_kernels
from worker.model.weights import describe

pytestmark = pytest.mark.torch
_FLAGS = Path("/proc/cpuinfo").read_text().split()
VNNI = "avx512_vnni" in _FLAGS
HERE = VNNI or "avx2" in _FLAGS
"""Whether this machine has the instructions; if not, the kernel must say so."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Int8Kernel | None]:
    folder = tmp_path_factory.mktemp("kernels")

    def load(threads: int) -> Int8Kernel | None:
        if HERE:
            return load_int8_kernel(folder, threads)
        with pytest.raises(NoCpuKernels, match="neither AVX512-VNNI nor AVX2"):
            load_int8_kernel(folder, threads)
        return None

    return load


def whole(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers of -127 .. 127, each row with the largest: its step is 1."""
    drawn = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed))
    drawn[..., -1] = 127
    return drawn


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 15, 16, 17, 63, 66, 576])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 64, 65, 190])
def test_sums_are_those_of_integers(
    make: Callable[[int], Int8Kernel | None], threads: int, inputs: int, outputs: int
) -> None:
    kernel = make(threads)
    weight = whole(outputs, inputs, seed=outputs)
    bias = torch.arange(outputs)
    for n in (0, 1, 2, 3, 4, 5, 6, 7, 13, 40):
        x = whole(n, inputs, seed=n)
        sums = x @ weight.t()
        for b in (None, bias):
            wanted = sums if b is None else sums + b
            if kernel is None:
                continue
            packed = kernel.pack(weight.to(torch.int8), torch.ones(outputs), b)
            assert torch.equal(kernel.linear(x.float(), packed), wanted.float())


def test_rows_may_lie_apart_and_are_more_than_a_block(
    make: Callable[[int], Int8Kernel | None],
) -> None:
    kernel = make(1)
    weight = whole(33, 4096, seed=3)
    wide = whole(230, 3 * 4096, seed=4)
    wide[:, 4096 * 2 - 1] = 127
    middle = wide[:, 4096 : 4096 * 2]
    flipped = middle.t().contiguous().t()
    wanted = (middle @ weight.t()).float()
    if kernel is not None:
        packed = kernel.pack(weight.to(torch.int8), torch.ones(33), None)
        for x in (wide.float()[:, 4096 : 4096 * 2], flipped.float()):
            assert torch.equal(kernel.linear(x, packed), wanted)
        assert torch.equal(kernel.linear(middle[::3].float(), packed), wanted[::3])


def test_the_most_inputs_do_not_overflow(make: Callable[[int], Int8Kernel | None]) -> None:
    kernel = make(1)
    size = 65_536
    weight = torch.full((2, size), 127, dtype=torch.int8)
    weight[1] = -127
    if kernel is not None:
        packed = kernel.pack(weight, torch.ones(2), None)
        for sign in (1.0, -1.0):
            out = kernel.linear(torch.full((1, size), sign * 127), packed)
            assert out.tolist() == [[sign * size * 127**2, -sign * size * 127**2]]


WRONG_WITH_VNNI = (
    ("offsets[n] -= MIDDLE", "offsets[n] -= LEVELS"),
    ("_MM_FROUND_TO_NEAREST_INT", "_MM_FROUND_TO_NEG_INF"),
)
WRONG_WITHOUT = (
    ("shifter = 12582912.0f", "shifter = 25165824.0f"),  # to even numbers
    ("if (left >= WIDTH) _mm256_storeu_ps(to, moved);", "if (left >= WIDTH) {}"),
    ("vpmaddwd %3, %2, %1", "vpmullw %3, %2, %1"),
)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("layer->scales + at", "layer->scales"),
        ("PANEL * GROUP + k % GROUP]", "PANEL * GROUP + GROUP - 1 - k % GROUP]"),
        ("steps + m, layer", "steps, layer"),
        *(WRONG_WITH_VNNI if VNNI else WRONG_WITHOUT),
    ],
)
def test_a_kernel_with_wrong_results_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    spoilt = tmp_path / "cpu_int8.c"
    text = cpu_int8._SOURCE.read_text()
    assert right in text
    spoilt.write_text(text.replace(right, wrong))
    monkeypatch.setattr(cpu_int8, "_SOURCE", spoilt)
    with pytest.raises(NoCpuKernels, match="differs" if HERE else "neither"):
        load_int8_kernel(tmp_path, 1)


def test_a_cpu_without_the_instructions_is_told(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = tmp_path / "cpu_int8.c"
    plain.write_text(cpu_int8._SOURCE.read_text().replace("#ifdef __AVX2__", "#if 0"))
    monkeypatch.setattr(cpu_int8, "_SOURCE", plain)
    with pytest.raises(NoCpuKernels, match="this CPU has neither AVX512-VNNI nor AVX2"):
        load_int8_kernel(tmp_path, 1)
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    config = ModelConfig(cache_dir=str(tmp_path), quantize="int8")
    with structlog.testing.capture_logs() as logs:
        made = with_cpu_kernels(loaded, config, 1)
    assert [line["event"] for line in logs] == ["int8_kernel_unavailable"]
    assert made.int8_kernel is None
    assert made.cpu_kernels is not None


def test_a_model_that_is_compiled_keeps_torchs_products(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], tmp_path: Path
) -> None:
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    config = ModelConfig(cache_dir=str(tmp_path), quantize="int8", compile=True)
    assert with_cpu_kernels(loaded, config, 1).int8_kernel is None
