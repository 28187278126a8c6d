"""The worker's own kernels give what torch's own layers and attention give."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.nn import functional

from shared.errors import ConfigError
from worker.config import ModelConfig
from worker.model import cpu_compile
from worker.model.cpu_compile import NoCpuKernels, load_cpu_kernels
from worker.model.cpu_kernels import CpuKernels, runs_of
from worker.model.kvcache import KvPool, LayerKv, LayerSpec
from worker.model.packed import KernelNorm, PackedLinear, pack_linears, replace_norms
from worker.model.runner import TorchRunner
from worker.model.speedups import takes_decodes, with_cpu_kernels
from worker.model.weights import describe

pytestmark = pytest.mark.torch
TAKEN = ("llama", "qwen2", "mistral", "phi3", "gpt_neox", "opt")
"""Of the families below, those whose heads and scores the kernel for decodes takes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of these tests find what one of them compiled."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def kernels(folder: Path) -> CpuKernels:
    return load_cpu_kernels(folder, 1)


def packed_twin(plain: nn.Linear, kernels: CpuKernels) -> nn.Module:
    holder = nn.ModuleDict({"layer": plain})
    assert pack_linears(holder, kernels) == 1
    assert isinstance(holder["layer"], PackedLinear)
    return holder["layer"]


@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_the_same_input_are_one_product(
    kernels: CpuKernels, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, widths = ("q_proj", "k_proj", "v_proj", "o_proj"), (64, 16, 16, 64)
    plain = {
        n: nn.Linear(64, w, bias=bias and n != "k_proj") for n, w in zip(names, widths, strict=True)
    }
    holder = nn.ModuleDict(plain)
    pack_linears(holder, kernels)
    calls = []
    linear = CpuKernels.linear
    monkeypatch.setattr(CpuKernels, "linear", lambda *a: calls.append(a) or linear(*a))
    x, other = torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    with torch.inference_mode():
        for given, order in ((x, names), (other, names[::-1]), (x, ("v_proj", "v_proj"))):
            for name in order:
                wanted = plain[name](given)
                torch.testing.assert_close(holder[name](given), wanted, rtol=1e-5, atol=1e-5)
        # two rounds of two products, and one for each call that repeats itself
        assert len(calls) == 6
        holder["q_proj"](x).zero_()  # what a layer hands out may be changed
        torch.testing.assert_close(holder["k_proj"](x), plain["k_proj"](x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 48, 130])
def test_a_packed_layer_computes_what_the_plain_one_does(
    kernels: CpuKernels, rows: int, bias: bool
) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(72, 40, bias=bias)
    x = torch.randn(1, rows, 72)
    with torch.inference_mode():
        packed = packed_twin(plain, kernels)(x)
        assert packed.shape == (1, rows, 40)
        torch.testing.assert_close(packed, plain(x), rtol=1e-5, atol=1e-5)


def test_only_plain_layers_are_packed_and_keep_their_sizes(kernels: CpuKernels) -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(8, 4), "own": Own(8, 4), "in": nn.ModuleList()})
    model["in"].append(nn.Linear(4, 2))
    model["wide"] = nn.Linear(8, 4, dtype=torch.float64)
    assert pack_linears(model, kernels) == 2
    assert type(model["wide"]) is nn.Linear
    assert isinstance(model["a"], PackedLinear)
    assert (model["a"].in_features, model["a"].out_features) == (8, 4)
    assert type(model["own"]) is Own


@pytest.mark.parametrize("part", [slice(None), slice(None, None, 2), slice(5, 6)])
def test_rows_that_lie_apart_are_multiplied_as_well(kernels: CpuKernels, part: slice) -> None:
    plain = nn.Linear(48, 100)
    wide = torch.randn(9, 3 * 48)[part]
    flipped = torch.randn(48, 9).t()[part]
    with torch.inference_mode():
        packed = packed_twin(plain, kernels)
        for x in (wide[:, 48:96], flipped, wide[:0, :48]):
            torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3", "olmo2", "opt"])
def test_norms_that_are_computed_alike_are_replaced(
    kind: str, config_of_kind: Callable[..., Any], model_of: Callable[..., Any], kernels: CpuKernels
) -> None:
    model = model_of(config_of_kind(kind), torch.float32)
    plain = {n: m for n, m in model.named_modules() if "RMSNorm" in type(m).__name__}
    for module in plain.values():
        nn.init.normal_(module.weight)
    assert replace_norms(model, kernels) == len(plain)
    assert bool(plain) == (kind != "opt")
    for name, module in plain.items():
        made = model.get_submodule(name)
        assert isinstance(made, KernelNorm)
        size = len(module.weight)
        apart = torch.randn(2, size, 7).transpose(1, 2)
        with torch.inference_mode():
            for x in (torch.randn(1, 5, size), apart, torch.zeros(1, 2, size)):
                torch.testing.assert_close(made(x), module(x), rtol=1e-5, atol=1e-6)
            assert made(torch.full((2, size), torch.nan)).isnan().all()


def test_a_norm_that_does_something_else_stays(kernels: CpuKernels) -> None:
    class OddRMSNorm(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    class FreeRMSNorm(nn.Module):
        eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(OddRMSNorm(32, eps=1e-6), FreeRMSNorm(), nn.RMSNorm(32, eps=1e-6))
    assert replace_norms(model, kernels) == 1
    assert [type(m) for m in model] == [OddRMSNorm, FreeRMSNorm, KernelNorm]


@pytest.mark.parametrize("size", [1, 7, 16, 17, 250, 4096])
def test_the_largest_logit_and_its_first_place(kernels: CpuKernels, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    rows = torch.randint(-4, 4, (40, size), generator=draw).float()  # many ties
    rows[1] = -torch.inf
    rows[2, size // 2] = torch.inf
    rows[3, size - 1] = torch.nan
    rows[4, 0] = torch.nan
    rows[5] = -torch.inf
    rows[5, size - 1] = -3.0
    for x in (rows, torch.cat([rows, rows], 1)[:, :size]):
        best, where = kernels.largest(x)
        for row, value, place in zip(rows, best, where, strict=True):
            if row.isnan().any():
                assert math.isnan(value)
            else:
                assert value == row.max()
                assert place == row.tolist().index(float(row.max()))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("outputs", [1, 15, 48, 250, 4096])
def test_the_largest_is_found_while_a_product_is_computed(
    folder: Path, outputs: int, threads: int
) -> None:
    kernels = load_cpu_kernels(folder, threads)
    draw = torch.Generator().manual_seed(outputs)
    # whole numbers: sums are exact, and there are ties, within a vector and between threads
    weight = torch.randint(-1, 2, (outputs, 12), generator=draw).float()
    bias = torch.randint(-1, 2, (outputs,), generator=draw).float()
    rows = torch.randint(-1, 2, (40, 12), generator=draw).float()
    rows[1] = 0.0
    rows[2, 3] = torch.nan
    rows[3] = torch.inf
    packed = kernels.pack(weight)
    for count in (0, 1, 2, 5, 40):
        for b in (None, bias):
            x = rows[len(rows) - count :]
            made, (best, where) = kernels.linear_largest(x, packed, b, outputs)
            assert torch.equal(
                made.nan_to_num(7e7), kernels.linear(x, packed, b, outputs).nan_to_num(7e7)
            )
            for row, value, place in zip(made, best, where, strict=True):
                if row.isnan().any():
                    assert math.isnan(value)
                else:
                    assert value == row.max()
                    assert place == row.tolist().index(float(row.max()))


@pytest.mark.parametrize("slots", [[3], [9, 0, 4, 31, 2]])
def test_kv_is_stored_where_torch_stores_it(kernels: CpuKernels, slots: list[int]) -> None:
    spec = LayerSpec(2, 16, 16, torch.float32, None)
    layers = [LayerKv(spec, torch.zeros(2, 32, 16), torch.zeros(2, 32, 16)) for _ in range(2)]
    key = torch.randn(1, len(slots), 2, 16).transpose(1, 2)[0]
    value = torch.randn(16, 2, len(slots)).permute(1, 2, 0)
    layers[0].write(torch.tensor(slots), key, value)
    kernels.store(layers[1], torch.tensor(slots), key, value)
    assert torch.equal(layers[0].keys, layers[1].keys)
    assert torch.equal(layers[0].values, layers[1].values)


def test_a_row_does_not_depend_on_its_batch(kernels: CpuKernels) -> None:
    packed = packed_twin(nn.Linear(200, 77), kernels)
    x = torch.randn(64, 200)
    with torch.inference_mode():
        whole = packed(x)
        for first, last in ((0, 1), (3, 5), (10, 17), (0, 63)):
            assert torch.equal(packed(x[first:last]), whole[first:last])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2", "phi3", "gpt_neox", "opt"])
def test_families_answer_the_same_packed_and_with_the_kernel(
    kind: str,
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    plain, twin = (describe(model_of(config_of_kind(kind), torch.float32)) for _ in range(2))
    packed = with_cpu_kernels(twin, ModelConfig(cache_dir=str(tmp_path)), 1)
    assert any(isinstance(module, PackedLinear) for module in packed.model.modules())
    assert takes_decodes(packed) == (kind in TAKEN)
    runners = (TorchRunner(plain, 40, 4, threads=1), TorchRunner(packed, 40, 4, threads=1))
    runners[1].check()
    from worker.runner import Chunk, StepPlan
    from worker.sequence import SamplingParams

    params, rng = SamplingParams(temperature=0.0), Random(3)
    tables = [rng.sample(range(i * 10, i * 10 + 10), 10) for i in range(4)]
    texts = [[rng.randrange(plain.vocab_size) for _ in range(36)] for _ in tables]
    for cuts in ((0, 9), (9, 10), (10, 31), (31, 32), (32, 33)):
        # ragged: every other sequence computes one token only, so both paths share a step
        spans = [(cuts if i % 2 else (cuts[1] - 1, cuts[1])) for i in range(4)]
        if cuts == (0, 9):
            spans = [cuts] * 4
        if cuts == (10, 31):
            spans = [cuts] * 4
        plan = StepPlan(
            tuple(
                Chunk(f"s{i}", a, tuple(texts[i][a:b]), tuple(tables[i]), True, params)
                for i, (a, b) in enumerate(spans)
            )
        )
        one, other = (runner.logits(plan) for runner in runners)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_a_model_that_reads_its_weights_itself_names_the_setting(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], tmp_path: Path
) -> None:
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    first = loaded.model.model.layers[0].mlp
    first.forward = lambda x: functional.linear(x, first.down_proj.weight[:, : x.shape[-1]])
    with pytest.raises(ConfigError, match="cpu_kernels"):
        with_cpu_kernels(loaded, ModelConfig(cache_dir=str(tmp_path)), 1)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
def test_the_kernel_attends_to_scattered_blocks_and_windows(
    kernels: CpuKernels, group: int, dim: int
) -> None:
    rng = Random(group * dim)
    kv_heads, block, n_blocks = 2, rng.choice([1, 3, 16]), 90
    draw = torch.Generator().manual_seed(dim)
    keys, values = (
        torch.randn(kv_heads, n_blocks * block, dim, generator=draw) * 3 for _ in range(2)
    )
    lengths = [1, block, block + 1, 15, 16, 17, 63 * block, 80 * block]
    tables = [(tuple(rng.sample(range(n_blocks), -(-n // block))), n) for n in lengths]
    query = torch.randn(len(tables), kv_heads * group, dim, generator=draw)
    for window in (None, 1, 7, 40 * block):
        layer = LayerKv(LayerSpec(kv_heads, dim, dim, torch.float32, window), keys, values)
        out = torch.full_like(query, torch.nan)
        kernels.attend(query, layer, runs_of(tables, block, window), out, 0.2)
        for row, (blocks, length) in enumerate(tables):
            slots = [b * block + i for b in blocks for i in range(block)][:length]
            slots = slots[max(0, length - (window or length)) :]
            part = query[row].view(kv_heads, group, dim).double()
            scores = part @ keys[:, slots].double().transpose(1, 2) * 0.2
            wanted = scores.softmax(-1) @ values[:, slots].double()
            torch.testing.assert_close(
                out[row].double(), wanted.flatten(0, 1), rtol=1e-4, atol=2e-5
            )


@pytest.mark.parametrize("heads", [1, 3])
def test_a_sequence_of_any_length_sees_its_own_keys_once(kernels: CpuKernels, heads: int) -> None:
    """Slots of nobody hold what would spoil every sum; a shorter and a longer sequence follow."""
    draw, block, longest = torch.Generator().manual_seed(heads), 4, 70
    order = torch.randperm(60, generator=draw).tolist()
    query = torch.randn(3, heads, 16, generator=draw)
    for length in range(1, longest):
        tables = [(tuple(order[:18]), length), (tuple(order[18:20]), 5), (tuple(order[20:45]), 99)]
        keys, values = (torch.full((heads, 240, 16), torch.nan) for _ in range(2))
        places = [
            [blocks[i // block] * block + i % block for i in range(n)] for blocks, n in tables
        ]
        for own in places:
            for cache in (keys, values):
                cache[:, own] = torch.randn(heads, len(own), 16, generator=draw)
        layer = LayerKv(LayerSpec(heads, 16, 16, torch.float32, None), keys, values)
        out = torch.empty_like(query)
        kernels.attend(query, layer, runs_of(tables, block, None), out, 0.3)
        for row, own in enumerate(places):
            scores = torch.einsum("hd,hnd->hn", query[row], keys[:, own]) * 0.3
            wanted = torch.einsum("hn,hnd->hd", scores.softmax(-1), values[:, own])
            torch.testing.assert_close(out[row], wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("length", [1, 6, 16, 37])
def test_what_is_no_number_is_seen_wherever_it_is(kernels: CpuKernels, length: int) -> None:
    runs = runs_of([((0, 1, 2), length), ((3, 4, 5), length)], 16, None)
    for at in range(length):
        keys, values = torch.zeros(1, 96, 16), torch.ones(1, 96, 16)
        keys[0, at] = torch.nan
        layer = LayerKv(LayerSpec(1, 16, 16, torch.float32, None), keys, values)
        query, out = torch.ones(2, 1, 16), torch.zeros(2, 1, 16)
        kernels.attend(query, layer, runs, out, 1.0)
        assert out[0].isnan().all()
        torch.testing.assert_close(out[1], torch.ones(1, 16))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_reads_the_pool_as_it_is_laid_out(threads: int, folder: Path) -> None:
    """Beside one another in the pool, or each a tensor: the same to the last bit."""
    spec, module = LayerSpec(3, 64, 64, torch.float32, None), nn.Identity()
    layer = KvPool({module: spec}, 60, 16, torch.device("cpu")).layers[module]
    assert layer.values.data_ptr() - layer.keys.data_ptr() == 64 * 4
    keys, values = (torch.randn(3, 61 * 16, 64) for _ in range(2))
    layer.write(torch.arange(61 * 16), keys, values)
    some = torch.tensor([700, 3, 4, 3])
    for found, wanted in zip(layer.gather(some), (keys, values), strict=True):
        assert torch.equal(found, wanted[:, some])
    blocks = Random(5).sample(range(60), 60)
    lengths = [1, 65, 64, 3, 200, 17, 128, 9, 300]  # short before long, and the other way round
    tables = [(tuple(blocks[4 * i : 4 * i + 19]), n) for i, n in enumerate(lengths)]
    query = torch.randn(len(tables), 9, 64)
    kernels = load_cpu_kernels(folder, threads)
    for some in (tables, tables[:1], tables[3:5]):
        outs = [torch.empty(len(some), 9, 64) for _ in range(2)]
        runs = runs_of(some, 16, None)
        for out, kv in zip(outs, (layer, LayerKv(spec, keys, values)), strict=True):
            kernels.attend(query[: len(some)], kv, runs, out, 0.125)
        assert torch.equal(*outs)


def test_what_is_no_number_stays_visible(kernels: CpuKernels) -> None:
    keys, values = torch.zeros(1, 32, 16), torch.ones(1, 32, 16)
    keys[0, 5] = torch.nan
    layer = LayerKv(LayerSpec(1, 16, 16, torch.float32, None), keys, values)
    query, out = torch.ones(2, 1, 16), torch.zeros(2, 1, 16)
    kernels.attend(query, layer, runs_of([((0,), 16), ((1,), 16)], 16, None), out, 1.0)
    assert out[0].isnan().all()
    assert out[1].eq(1).all()


def test_several_threads_give_the_same(folder: Path, kernels: CpuKernels) -> None:
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(3, 640, 64, generator=draw) for _ in range(2))
    layer = LayerKv(LayerSpec(3, 64, 64, torch.float32, None), keys, values)
    query = torch.randn(9, 9, 64, generator=draw)
    runs = runs_of([(tuple(range(i, i + 30)), 470) for i in range(9)], 16, None)
    one, two = torch.empty_like(query), torch.empty_like(query)
    kernels.attend(query, layer, runs, one, 0.125)
    load_cpu_kernels(folder, 2).attend(query, layer, runs, two, 0.125)
    assert torch.equal(one, two)


def test_without_a_compiler_there_is_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NoCpuKernels, match="compiler"):
        load_cpu_kernels(tmp_path, 1)


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: out of order' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(NoCpuKernels, match="out of order"):
        load_cpu_kernels(tmp_path / "made", 1)
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("_ATTENTION", "vecs + i] / total", "vecs + i] * 1.001f / total"),
        ("_ATTENTION", "? -INFINITY : 0.0f", "? 0.0f : 0.0f"),
        ("_ATTENTION", "(run[0] + place->in_run)", "run[0]"),
        ("_SOURCE", "sum[m][i] += factor * weight[i]", "sum[m][i] -= factor * weight[i]"),
        ("_SOURCE", "n < outputs ? w[n", "n + 1 < outputs ? w[n"),
        ("_CHUNK", "/ space->total[r]", "* 1.001f / space->total[r]"),
        ("_CHUNK", "position + 1 > call->window", "position > call->window"),
        ("_CHUNK", "to = position + 1 <", "to = position + 2 <"),
    ],
)
def test_kernels_with_wrong_results_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, right: str, wrong: str
) -> None:
    spoilt = tmp_path / "spoilt.c"
    path = Path(getattr(cpu_compile, source))
    header = path.with_name("cpu_attend.h")
    text = path.read_text().replace(f'#include "{header.name}"', header.read_text())
    assert right in text
    spoilt.write_text(text.replace(right, wrong))
    monkeypatch.setattr(cpu_compile, source, spoilt)
    with pytest.raises(NoCpuKernels, match="differs"):
        load_cpu_kernels(tmp_path, 1)


def test_without_kernels_the_model_stays_as_it_is(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    assert with_cpu_kernels(loaded, ModelConfig(cpu_kernels=False), 1) is loaded
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with structlog.testing.capture_logs() as logs:
        assert with_cpu_kernels(loaded, ModelConfig(cache_dir=str(tmp_path)), 1) is loaded
    assert [line["event"] for line in logs] == ["cpu_kernels_unavailable"]
    double = describe(model_of(config_of_kind("llama"), torch.float64))
    assert with_cpu_kernels(double, ModelConfig(), 1) is double


def test_a_change_of_any_header_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, headers = tmp_path / "a.c", [tmp_path / "b.h", tmp_path / "c.h"]
    monkeypatch.setattr(cpu_compile, "_HEADERS", tuple(headers))
    for path in (source, *headers):
        path.write_text("int one;")
    made = {cpu_compile.open_library(source, tmp_path / "made")._name}
    for path in headers:
        path.write_text("int two;")
        made.add(cpu_compile.open_library(source, tmp_path / "made")._name)
    assert len(made) == 3
    used = set(re.findall(r'#include "(.+)"', "".join(map(Path.read_text, cpu_sources()))))
    monkeypatch.undo()
    assert used == {path.name for path in cpu_compile._HEADERS}


def cpu_sources() -> list[Path]:
    here = Path(cpu_compile.__file__).parent
    return [*here.glob("cpu_*.c"), *here.glob("cpu_*.h")]


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_cpu_kernels(tmp_path, 1)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert shutil.which("cc")
    load_cpu_kernels(tmp_path, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made
