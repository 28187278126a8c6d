"""Memory in large pages is memory like any other."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from worker.model.hugepages import LARGE, Arena, huge_empty

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("shape", [(3, 5), (LARGE // 4,), (700, 3, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_it_holds_what_is_written_and_outlives_its_names(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = huge_empty(shape, dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == (shape, dtype, True)
    wanted = torch.randint(-100, 100, shape).to(dtype)
    part = made.copy_(wanted).flatten()[1:]
    del made
    gc.collect()
    assert torch.equal(part, wanted.flatten()[1:])


def test_tensors_of_an_arena_are_neighbours_that_do_not_overlap() -> None:
    arena, sizes = Arena(), [1, 17, 100_000, 9 << 20, 5]
    made = [arena.empty(size, torch.float32).fill_(i) for i, size in enumerate(sizes)]
    for i, (tensor, size) in enumerate(zip(made, sizes, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.eq(i).all()
    assert made[1].data_ptr() - made[0].data_ptr() == 64


def test_a_system_without_large_pages_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert huge_empty((LARGE,), torch.float32).fill_(2).eq(2).all()
    assert Arena().empty(7, torch.int8).fill_(3).tolist() == [3] * 7


@pytest.mark.parametrize("size", [1 << 50, 1 << 62])
def test_more_than_there_is_fails_as_it_does_in_torch(size: int) -> None:
    with pytest.raises(RuntimeError):
        torch.empty(size, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        huge_empty((size,), torch.uint8)
