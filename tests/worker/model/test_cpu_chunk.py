"""The kernel for chunks of prompts gives what a plain softmax gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from worker.model.cpu_chunk import ChunkKernel
from worker.model.cpu_compile import load_cpu_kernels, open_library
from worker.model.kvcache import KvPool, LayerKv, LayerSpec

pytestmark = pytest.mark.torch
KV_HEADS, GROUP, SLOTS = 2, 3, 1200
SOURCE = Path(__file__).parents[3] / "worker" / "model" / "cpu_chunk.c"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=[1, 3], ids=["one thread", "three"])
def chunks(folder: Path, request: pytest.FixtureRequest) -> ChunkKernel:
    return ChunkKernel(open_library(SOURCE, folder), request.param)


def layer_of(dim: int, window: int | None) -> LayerKv:
    spec = LayerSpec(KV_HEADS, dim, dim, torch.float32, window)
    pool = KvPool({torch.nn.Identity(): spec}, SLOTS // 16, 16, torch.device("cpu"))
    [layer] = pool.layers.values()
    draw = torch.Generator().manual_seed(dim)
    for part in (layer.keys, layer.values):
        part.copy_(torch.randn(part.shape, generator=draw))
    return layer


def plain(query: Tensor, layer: LayerKv, slots: slice | Tensor, start: int) -> Tensor:
    """In float64, all at once."""
    rows, heads, dim = query.shape
    keys, values = (part[:, slots].double() for part in (layer.keys, layer.values))
    visible = torch.ones(rows, keys.shape[1], dtype=torch.bool).tril(start)
    if layer.spec.window is not None:
        visible = visible.triu(start - layer.spec.window + 1)
    grouped = query.double().view(rows, KV_HEADS, heads // KV_HEADS, dim).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(2, 3) * 0.3
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(query.shape)


@pytest.mark.parametrize("window", [None, 1, 70, 500])
@pytest.mark.parametrize(
    ("rows", "start"), [(1, 0), (1, 700), (2, 0), (7, 143), (48, 1000), (145, 2), (300, 0)]
)
def test_chunks_see_what_is_before_them(
    chunks: ChunkKernel, rows: int, start: int, window: int | None
) -> None:
    draw = torch.Generator().manual_seed(rows)
    for dim in (16, 64, 80):
        layer = layer_of(dim, window)
        query = torch.randn(rows, KV_HEADS * GROUP, dim, generator=draw) * 3
        scattered = torch.randperm(SLOTS, generator=draw)[: start + rows]
        for slots in (scattered, slice(11, 11 + start + rows)):
            out = torch.full_like(query, torch.nan)
            chunks.attend(query, layer, slots, start, out, 0.3)
            torch.testing.assert_close(
                out.double(), plain(query, layer, slots, start), rtol=1e-4, atol=2e-5
            )


def test_queries_and_results_may_lie_apart(chunks: ChunkKernel) -> None:
    layer, start = layer_of(64, None), 200
    by_head = torch.randn(KV_HEADS * GROUP, 30, 64)
    wide = torch.zeros(30, 2 * KV_HEADS * GROUP, 64)
    out, slots = wide[:, ::2], torch.randperm(SLOTS)[:230]
    chunks.attend(by_head.transpose(0, 1), layer, slots, start, out, 0.3)
    wanted = plain(by_head.transpose(0, 1).contiguous(), layer, slots, start)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-5)
    assert not wide[:, 1::2].any()


def test_a_row_does_not_depend_on_how_its_prompt_was_cut(chunks: ChunkKernel) -> None:
    layer, slots = layer_of(64, None), torch.randperm(SLOTS)
    query = torch.randn(600, KV_HEADS * GROUP, 64)
    whole = torch.empty_like(query)
    chunks.attend(query, layer, slots[:600], 0, whole, 0.3)
    for begin, end in ((0, 1), (1, 30), (30, 431), (431, 600)):
        part = torch.empty_like(query[begin:end])
        chunks.attend(query[begin:end], layer, slots[:end], begin, part, 0.3)
        assert torch.equal(part, whole[begin:end])


def test_what_is_no_number_stays_so_and_what_is_hidden_is_not_met(chunks: ChunkKernel) -> None:
    layer = layer_of(64, None)
    query = torch.randn(40, KV_HEADS * GROUP, 64)
    layer.values[:, 500:] = torch.inf  # of nobody here
    out = torch.empty_like(query)
    chunks.attend(query, layer, slice(460, 500), 0, out, 0.3)
    assert out.isfinite().all()
    query[5, 0, 3] = torch.nan
    chunks.attend(query, layer, slice(460, 500), 0, out, 0.3)
    assert out[5, 0].isnan().all()
    out[5, 0] = 0
    assert out.isfinite().all()


def test_it_serves_where_it_is_faster(folder: Path, chunks: ChunkKernel) -> None:
    assert (load_cpu_kernels(folder, 1).chunks is not None) == chunks.pays
