"""Asking single processes, over the admin listener that each has on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from shared.errors import HeadwaterError

ANSWER_S = 10.0


class Silent(HeadwaterError):
    """A process did not answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a process answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """It did what was asked."""
        return 200 <= self.status < 300

    def json(self) -> dict[str, Any]:
        """The object in its body."""
        found: dict[str, Any] = msgspec.json.decode(self.body, type=dict[str, Any])
        return found


class Calls:
    """``urls``: base URLs by number of process. Needs a running event loop; close it."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self._urls = urls
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        )

    async def ask(
        self,
        process: int,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request; ``path`` as it is to be sent. Raises :class:`Silent`."""
        from yarl import URL

        url = URL(f"{self._urls[process]}{path}", encoded=True)
        try:
            async with self._session.request(method, url, data=body, headers=headers) as answer:
                return Reply(answer.status, answer.headers, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Silent(f"process {process}: {type(error).__name__}") from error

    async def ask_all(
        self, processes: Sequence[int], method: str, path: str, body: bytes | None = None
    ) -> dict[int, Reply | Silent]:
        """The same of many at once, in their order."""
        asked = (self.ask(process, method, path, body) for process in processes)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        found: dict[int, Reply | Silent] = {}
        for process, reply in zip(processes, replies, strict=True):
            if isinstance(reply, BaseException) and not isinstance(reply, Silent):
                raise reply
            found[process] = reply
        return found

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
