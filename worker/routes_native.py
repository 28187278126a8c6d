"""The protocol our gateway speaks with our worker: identity, load, tokenizer, cache events.

``GET /headwater/events?epoch=E&after=SEQ`` never ends: frames of a u32 (little endian) length and
so many bytes of msgpack ``EventBatch``. The first frame is a snapshot, unless the reader's epoch is
this one and the batches after SEQ are still remembered; then those follow. An empty frame each
second says that the feed is alive.
"""

from __future__ import annotations

from asyncio import sleep as pause
from collections.abc import Iterable

from aiohttp import web

from shared.errors import BadRequest
from shared.render import encode_bundle
from worker.eventlog import EventLog
from worker.service import Service
from worker.web import json_response

KEEPALIVE_S = 1.0
GATHER_S = 0.02
"""Batches that follow each other this closely go out as one write: each write wakes every reader.
A reader learns so much later what a cache holds, which is less than most prefills take."""
_LONGEST_NUMBER = 20


def frame(payload: bytes) -> bytes:
    """Length and payload."""
    return len(payload).to_bytes(4, "little") + payload


def frames(payloads: Iterable[bytes]) -> bytes:
    """Several frames in one write."""
    return b"".join(map(frame, payloads))


class NativeRoutes:
    """Handlers under ``/headwater/``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get("/headwater/info", self.info)
        app.router.add_get("/headwater/load", self.load)
        app.router.add_get("/headwater/tokenizer", self.tokenizer)
        app.router.add_get("/headwater/events", self.events)

    async def info(self, _request: web.Request) -> web.Response:
        """``shared.load.WorkerInfo``."""
        return json_response(self._service.info())

    async def load(self, _request: web.Request) -> web.Response:
        """``shared.load.WorkerLoad``."""
        return json_response(self._service.load())

    async def tokenizer(self, request: web.Request) -> web.Response:
        """The tokenizer bundle in msgpack; its fingerprint is the ETag."""
        loaded = self._service.loaded()
        tag = f'"{loaded.info.tokenizer}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        return web.Response(
            body=encode_bundle(loaded.bundle),
            content_type="application/msgpack",
            headers={"ETag": tag},
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The event feed."""
        log = self._service.events()
        epoch, after = _number(request, "epoch"), _number(request, "after")
        position = after if epoch == log.epoch and after is not None else None
        if position is not None and log.since(position, 1) is None:
            position = None
        response = web.StreamResponse(
            headers={"Content-Type": "application/octet-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        await self._feed(log, response, position)
        return response

    async def _feed(
        self, log: EventLog, response: web.StreamResponse, position: int | None
    ) -> None:
        while not log.closed:
            # A reader so slow that its position left the log starts again from a snapshot.
            entries = None if position is None else log.since(position)
            if entries is None:
                contents = await self._service.contents()
                await response.write(frame(log.snapshot(contents)))
                position = contents.seq
                continue
            if entries:
                await response.write(frames(entry.data for entry in entries))
                position = entries[-1].seq
            if position is not None and not await log.wait_beyond(position, KEEPALIVE_S):
                await response.write(frame(b""))
            elif not log.closed:
                await pause(GATHER_S)


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
        raise BadRequest(f"'{name}' must be a number.", param=name)
    return int(text)
