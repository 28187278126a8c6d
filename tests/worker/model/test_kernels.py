"""Attention kernels of a GPU, stood in for by what their documentation says, written out.

The kernels run nowhere here; what is checked is that each gets the arguments it documents, that the
probe refuses one that is wrong, and that recorded decode steps give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
import torch

from worker.model.kernels import choose as choosing
from worker.model.kernels import table as tables
from worker.model.kernels.base import Kernel
from worker.model.kernels.choose import choose, probe
from worker.model.kernels.inplace import InPlace
from worker.model.kernels.table import BlockTable
from worker.model.kvcache import KvPool, LayerKv, LayerSpec
from worker.model.recorded import MOST_ROWS, RecordedDecode, bucket
from worker.model.weights import describe
from worker.runner import StepPlan

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window_left: int,
) -> torch.Tensor:
    """One sequence, ``[n, heads, dim]`` each: causal, aligned at the lower right."""
    group = query.shape[1] // keys.shape[1]
    query, keys, values = (x.transpose(0, 1) for x in (query, keys, values))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    used = keys.shape[1]
    at = torch.arange(used - query.shape[1], used)[:, None]
    other = torch.arange(used)
    seen = other <= at
    if window_left >= 0:
        seen &= other >= at - window_left
    scores = query @ keys.transpose(1, 2) * scale
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1)


def varlen_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int | None,
) -> torch.Tensor:
    """``varlen_attn`` over a block table, as FlashAttention 2 wants it called."""
    assert num_splits == 1
    assert cu_seq_k is not None
    assert query.is_contiguous()
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert window_size[1] == 0
    assert max_k >= int(seqused_k.max())
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    parts = []
    for line, used in enumerate(seqused_k.tolist()):
        part = query[cu_seq_q[line] : cu_seq_q[line + 1]]
        assert part.shape[0] <= max_q
        keys, values = (
            pool[block_table[line].long()].flatten(0, 1)[:used] for pool in (key, value)
        )
        parts.append(attend(part, keys, values, scale=scale, window_left=window_size[0]))
    return torch.cat(parts)


def flash_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """``_flash_attention_forward`` on ranges: a start and a used length for the keys of each."""
    assert dropout_p == 0
    assert not return_debug_mask
    assert is_causal == (window_size_left is None)
    assert (window_size_left is None) == (window_size_right is None)
    assert len(cum_seq_k) == len(cum_seq_q) == len(seqused_k) + 1
    assert cum_seq_k.dtype == seqused_k.dtype == cum_seq_q.dtype == torch.int32
    assert max_k >= int(seqused_k.max())
    parts = []
    for line, used in enumerate(seqused_k.tolist()):
        part = query[cum_seq_q[line] : cum_seq_q[line + 1]]
        assert part.shape[0] <= max_q
        keys, values = (x[cum_seq_k[line] : cum_seq_k[line] + used] for x in (key, value))
        left = -1 if window_size_left is None else window_size_left
        parts.append(attend(part, keys, values, scale=scale, window_left=left))
    return torch.cat(parts), torch.empty(0)


STAND_INS: dict[str, Kernel] = {
    "block_table": BlockTable(varlen_by_hand),
    "in_place": InPlace(flash_by_hand),
}


class NaNForLaterRows(BlockTable):
    """As in pytorch issue 194167: the rows of all sequences but the first stay unwritten."""

    def prepare(self, *args: Any) -> Any:
        whole = super().prepare(*args)

        def call(query: torch.Tensor, layer: LayerKv, scale: float) -> torch.Tensor:
            out = whole(query, layer, scale)
            out[1:] = float("nan")
            return out

        return call


def layers(window: int | None = None) -> list[LayerKv]:
    spec = LayerSpec(2, 16, 16, torch.float32, window)
    return list(KvPool({torch.nn.Identity(): spec}, 2, 8, CPU).layers.values())


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_right_kernel_passes_the_probe(name: str, window: int | None, block_size: int) -> None:
    specs = {layer.spec for layer in layers(window)}
    assert probe(STAND_INS[name], CPU, specs, block_size) == ""


def test_a_wrong_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {layer.spec for layer in layers()}

    def upper_left(*args: Any, **more: Any) -> torch.Tensor:
        query, key, value, starts, *_ = args
        out = torch.zeros_like(query)
        for line in range(len(starts) - 1):
            part = slice(int(starts[line]), int(starts[line + 1]))
            used = part.stop - part.start
            keys = key[more["block_table"][line].long()].flatten(0, 1)[:used]
            values = value[more["block_table"][line].long()].flatten(0, 1)[:used]
            out[part] = attend(query[part], keys, values, scale=more["scale"], window_left=-1)
        return out

    def absent(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nat line 1")

    assert "off by nan" in probe(NaNForLaterRows(varlen_by_hand), CPU, specs, 16)
    assert "off by" in probe(BlockTable(upper_left), CPU, specs, 16)
    assert probe(BlockTable(absent), CPU, specs, 16).endswith("divisible by 256")
    one_more = InPlace(lambda *a, **m: flash_by_hand(*a, **{**m, "seqused_k": m["seqused_k"] - 1}))
    assert "off by" in probe(one_more, CPU, specs, 16)
    no_window = InPlace(
        lambda *a, **m: flash_by_hand(
            *a[:8], True, False, **{**m, "window_size_left": None, "window_size_right": None}
        )
    )
    assert "off by" in probe(no_window, CPU, {layers(300)[0].spec}, 16)


def test_the_first_kernel_that_is_right_is_taken_and_the_others_reasons_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockTable, "refusal", lambda *_: "")
    monkeypatch.setattr(InPlace, "refusal", lambda *_: "")
    monkeypatch.setattr(choosing, "_activate_newer_flash", lambda _: None)
    real = choosing.probe
    monkeypatch.setattr(choosing, "probe", lambda kernel, _, *more: real(kernel, CPU, *more))
    broken, good = NaNForLaterRows(varlen_by_hand), STAND_INS["in_place"]
    with structlog.testing.capture_logs() as logs:
        assert choose(torch.device("cuda:0"), layers(), 16, (broken, good)) is good
        assert choose(torch.device("cuda:0"), layers(), 16, (broken,)) is None
    assert [line["event"] for line in logs] == [
        "attention_kernel_passed_over",
        "attention_kernel",
        "attention_kernel_passed_over",
    ]
    assert "off by nan" in logs[0]["reason"]


def test_kernels_refuse_what_they_cannot_do(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda:0")

    def made(kind: str, dtype: torch.dtype, **changes: Any) -> list[LayerKv]:
        model = describe(model_of(config_of_kind(kind, **changes), dtype))
        return list(KvPool(model.layers, 2, 4, CPU).layers.values())

    half = made("llama", torch.bfloat16)
    table, ranges = BlockTable(varlen_by_hand), InPlace()
    assert table.refusal(cuda, half, 512) == ranges.refusal(cuda, half, 16) == ""
    assert "CUDA, not cpu" in ranges.refusal(CPU, half, 16)
    assert "half precision" in ranges.refusal(cuda, made("llama", torch.float32), 16)
    assert "soft cap" in ranges.refusal(cuda, made("gemma2", torch.bfloat16), 16)
    assert "head sizes" in ranges.refusal(cuda, made("llama", torch.bfloat16, head_dim=12), 16)
    assert "multiple of 256" in table.refusal(cuda, half, 16)
    assert "block_table" in BlockTable(lambda query, key: None).refusal(cuda, half, 256)
    assert "block_table" in BlockTable(None).refusal(cuda, half, 256)
    monkeypatch.setattr(tables, "newer_flash", lambda: True)
    assert table.refusal(cuda, half, 16) == ""


def test_no_kernel_is_chosen_on_a_cpu_without_a_word(driver: Callable[..., Any]) -> None:
    with structlog.testing.capture_logs() as logs:
        assert driver("llama").runner.kernel is None
    assert logs == []


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "llama_mha_bias"])
def test_steps_through_a_kernel_give_the_tokens_of_generate(
    driver: Callable[..., Any], kind: str, name: str
) -> None:
    made = driver(kind)
    made.runner.use_kernel(STAND_INS[name])
    made.runner.check()
    prompts = [list(range(2, 60)), list(range(9, 40)), [7, 8]]
    blocks = [made.blocks(70, first=20 * i, scattered=i == 1) for i in range(3)]
    together = made.decode_together(prompts, 6, blocks, size=13)
    assert together == [made.expected(prompt, 6)[0] for prompt in prompts]


def test_a_kernel_that_fails_on_the_model_is_replaced(driver: Callable[..., Any]) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("page size must be a multiple of 256")

    made = driver("llama")
    made.runner.use_kernel(BlockTable(broken))
    with structlog.testing.capture_logs() as logs:
        made.runner.check()
    assert [line["event"] for line in logs] == ["attention_kernel_unusable"]
    assert "multiple of 256" in logs[0]["reason"]
    prompt = list(range(2, 60))
    assert made.decode(prompt, 4, made.blocks(70))[0] == made.expected(prompt, 4)[0]


# ---- recorded decode steps: on a CPU a replay is the call itself ----


def recorded(made: Any, kernel: Kernel | None) -> RecordedDecode:
    """Make a driver's runner replay its decode steps."""
    made.runner.use_kernel(kernel)
    made.runner.record_decodes(lambda step: step)
    assert made.runner.recorded is not None
    return made.runner.recorded


@pytest.mark.parametrize("name", ["block_table", "in_place", None])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "llama_mha_bias"])
def test_replayed_steps_give_the_tokens_of_generate(
    driver: Callable[..., Any], kind: str, name: str | None
) -> None:
    made = driver(kind)
    steps = recorded(made, None if name is None else STAND_INS[name])
    prompts = [list(range(2, 60)), list(range(9, 40)), [7, 8], [3], list(range(50, 9, -2))]
    for scattered in (False, True):
        blocks = [
            made.blocks(70, first=20 * i, scattered=scattered and i == 1)
            for i in range(len(prompts))
        ]
        before = steps.replays
        together = made.decode_together(prompts, 9, blocks, size=64)
        assert together == [made.expected(prompt, 9)[0] for prompt in prompts]
        assert steps.replays - before == 8


def test_a_bucket_is_recorded_once_and_forgotten_on_demand(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    recordings = []
    steps = recorded(made, None)
    steps._record = lambda step: recordings.append(step) or step  # type: ignore[func-returns-value]
    prompt = list(range(2, 40))
    first = made.decode(prompt, 8, made.blocks(60))[0]
    assert len(recordings) == 1
    steps.clear()
    assert made.decode(prompt, 8, made.blocks(60, first=9))[0] == first
    assert len(recordings) == 2
    made.decode(list(range(2, 120)) * 2, 30, made.blocks(300))  # grows out of the bucket of 256
    assert len(recordings) == 3


def test_a_step_that_cannot_be_recorded_runs_as_it_is(driver: Callable[..., Any]) -> None:
    def fails(step: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    made = driver("llama")
    steps = recorded(made, None)
    steps._record = fails
    prompt = list(range(2, 40))
    with structlog.testing.capture_logs() as logs:
        assert made.decode(prompt, 5, made.blocks(60))[0] == made.expected(prompt, 5)[0]
    assert [line["event"] for line in logs] == ["decode_recording_failed"]
    assert steps.off
    assert steps.replays == 0


def test_soft_capped_models_are_not_recorded(driver: Callable[..., Any]) -> None:
    made = driver("gemma2")
    steps = recorded(made, None)
    prompt = list(range(2, 40))
    assert made.decode(prompt, 4, made.blocks(60))[0] == made.expected(prompt, 4)[0]
    assert steps.replays == 0


def test_only_decode_steps_are_replayed(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    steps = recorded(made, None)
    blocks = made.blocks(60)
    prefill = made.chunk("a", [5, 6, 7], 0, blocks)
    assert steps.logits(StepPlan((prefill,)), None) is None
    many = tuple(made.chunk(str(i), [5], 0, (i % 9,)) for i in range(MOST_ROWS + 1))
    assert steps.logits(StepPlan(many), None) is None


def test_buckets() -> None:
    sizes = [bucket(n) for n in range(1, 300)]
    assert all(n <= size <= max(n + 1, 2 * n) for n, size in enumerate(sizes, 1))
    assert all(size <= 1.3 * n for n, size in enumerate(sizes, 1) if n > 8)
    assert len(set(sizes[:MOST_ROWS])) <= 30
    assert sizes == sorted(sizes)
