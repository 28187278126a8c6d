"""The live status lines of ``headwater up``: one per worker, from the first gateway's admin API."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import Group
from rich.live import Live
from rich.text import Text

from gateway.cluster.plan import ClusterOptions, gateway_ports
from gateway.cluster.supervisor import Supervisor

TERMINAL_EVERY_S, PIPE_EVERY_S, WHOLE_EVERY_S = 1.0, 10.0, 0.1


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """What is shown of one worker."""

    id: str
    state: str
    trust: str
    inflight: int
    index_blocks: int
    served: int
    prompt_tokens: int
    cached_tokens: int

    def __str__(self) -> str:
        hit = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        # what matters most stands within the 80 columns of a small terminal
        return (
            f"worker {self.id}  {self.state}  requests {self.served}  "
            f"prompt tokens {self.prompt_tokens}, {hit:.0%} from cache  "
            f"running {self.inflight}  cached blocks {self.index_blocks}  trust {self.trust}"
        )


def parse_workers(body: bytes) -> list[WorkerLine]:
    """Lines from the JSON of ``GET /admin/workers``."""
    listing = msgspec.json.decode(body)
    return [
        WorkerLine(
            id=entry["id"],
            state=entry["state"],
            trust=entry["trust"],
            inflight=entry["inflight"],
            index_blocks=entry["index_blocks"],
            served=entry["requests"],
            prompt_tokens=entry["prompt_tokens"],
            cached_tokens=entry["cached_tokens"],
        )
        for entry in listing["workers"]
    ]


async def until_whole(options: ClusterOptions, supervisor: Supervisor, within_s: float) -> None:
    """Until every gateway has all workers, or so long: a burst then finds them all. Those that
    are late, or never come, are in the lines that follow."""
    clock = asyncio.get_running_loop().time
    until = clock() + within_s
    for _, admin_port in gateway_ports(options):
        url = f"http://127.0.0.1:{admin_port}"
        async with httpx.AsyncClient(base_url=url, timeout=2.0, trust_env=False) as client:
            while not supervisor.leaving and clock() < until:
                with suppress(httpx.HTTPError):  # a gateway that is just started again
                    workers = await _workers(client)
                    if sum(worker.state == "ready" for worker in workers) >= options.workers:
                        break
                await _pause(supervisor, WHOLE_EVERY_S)


async def show(options: ClusterOptions, supervisor: Supervisor) -> None:
    """Until a stop is asked for: redraw on a terminal, elsewhere print what changed."""
    _, admin_port = gateway_ports(options)[0]
    on_terminal = sys.stdout.isatty()
    live = Live(refresh_per_second=4, transient=True) if on_terminal else None
    last = ""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=2.0) as client:
        if live is not None:
            live.start()
        try:
            while not supervisor.leaving:
                text = await _fetch(client)
                if live is not None:
                    live.update(Group(*(Text(line, no_wrap=True) for line in text.splitlines())))
                elif text != last:
                    print(text, flush=True)  # noqa: T201 - this is the command's output
                    last = text
                await _pause(supervisor, TERMINAL_EVERY_S if on_terminal else PIPE_EVERY_S)
        finally:
            if live is not None:
                live.stop()


async def _fetch(client: httpx.AsyncClient) -> str:
    try:
        lines = await _workers(client)
    except httpx.HTTPError as error:
        return f"gateway: no status ({type(error).__name__})"
    return "\n".join(map(str, lines)) if lines else "no worker yet"


async def _workers(client: httpx.AsyncClient) -> list[WorkerLine]:
    answer = await client.get("/admin/workers")
    answer.raise_for_status()
    return parse_workers(answer.content)


async def _pause(supervisor: Supervisor, seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    await supervisor.until(lambda: asyncio.get_running_loop().time() >= deadline)
