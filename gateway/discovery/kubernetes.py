"""EndpointSlices of Kubernetes services, followed as its own clients do: list, then watch.

    list    GET .../endpointslices?labelSelector=...            -> resourceVersion
    watch   the same with watch=1&resourceVersion=...           -> ADDED MODIFIED DELETED BOOKMARK
    410     the version is too old: list again
A watch that ends is taken up where it stopped. Whatever fails, the list stays as it was.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from gateway.config import KubernetesConfig
from gateway.discovery.base import Fault, Source, Tell, worker_url
from gateway.discovery.slices import SERVICE_LABEL, Metadata, Slice, SliceList, SliceStore
from shared.errors import ConfigError

KEY = "discovery.kubernetes"
PAGE = 500
WATCH_S = 60
"""How long the server is asked to keep one watch open. Short, so that a connection that died
without a word is noticed soon."""
SILENT_S = WATCH_S + 15
SHORTEST_WATCH_S = 1.0
"""A watch that ends sooner is taken up again after a pause."""
ANSWER_S = 10.0
LINE_LIMIT = 16 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class KubeError(Exception):
    """The API server cannot be used now; the message says why."""


class Gone(Exception):
    """The version asked for is not kept any more."""


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Bookmark(msgspec.Struct):
    metadata: Metadata


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


def api_url(config: KubernetesConfig, env: Mapping[str, str]) -> str:
    """The API server's base URL.

    :raises ConfigError: it is not given, and this is no pod.
    """
    if config.api:
        return worker_url(f"{KEY}.api", config.api)
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(f"{KEY}.api", "", "required outside of a pod")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def namespace_of(config: KubernetesConfig) -> str:
    """As configured, else that of the pod.

    :raises ConfigError: neither.
    """
    if config.namespace:
        return config.namespace
    place = Path(config.token_file).with_name("namespace")
    try:
        return place.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY}.namespace", "", "required outside of a pod") from error


class KubernetesList:
    """Follows the slices of all configured services."""

    source = Source.KUBERNETES

    def __init__(self, config: KubernetesConfig, env: Mapping[str, str], rng: Random) -> None:
        """:raises ConfigError: there is no API server or namespace to ask."""
        self._config, self._rng = config, rng
        namespace = namespace_of(config)
        self._url = (
            f"{api_url(config, env)}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        )
        services = ",".join(config.services)
        self._selector = {"labelSelector": f"{SERVICE_LABEL} in ({services})"}
        self._store = SliceStore(config)
        self._failures = 0

    async def run(self, tell: Tell, fault: Fault) -> None:
        """Follow for ever."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=SILENT_S)
        version: str | None = None
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    if version is None:
                        version = await self._list(session)
                        self._say(tell, fault)
                    began = asyncio.get_running_loop().time()
                    async with aclosing(self._watch(session, version)) as events:
                        async for event in events:
                            version = self._take(event) or version
                            self._failures = 0
                            if event.type != "BOOKMARK":
                                self._say(tell, fault)
                    if asyncio.get_running_loop().time() - began < SHORTEST_WATCH_S:
                        await self._pause()
                except Gone:
                    version = None
                    await self._pause()
                except KubeError as error:
                    fault(str(error))
                    await self._pause()

    def _say(self, tell: Tell, fault: Fault) -> None:
        tell(self._store.listing())
        fault("; ".join(self._store.problems()))

    async def _pause(self) -> None:
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Read the whole list, page by page; returns its version."""
        found: list[Slice] = []
        more = ""
        while True:
            params = {**self._selector, "limit": str(PAGE)}
            if more:
                params["continue"] = more
            async with aclosing(self._get(session, params, ANSWER_S)) as parts:
                body = b"".join([part async for part in parts])
            try:
                page = msgspec.json.decode(body, type=SliceList)
            except (msgspec.DecodeError, RecursionError) as error:
                raise KubeError(f"the list of EndpointSlices cannot be read: {error}") from error
            found += page.items or []
            more = page.metadata.continue_ or ""
            if not more:
                self._store.replace(found)
                self._failures = 0
                return page.metadata.resourceVersion

    async def _watch(
        self, session: aiohttp.ClientSession, version: str
    ) -> AsyncGenerator[_Event, None]:
        """Changes since ``version``; ends when the server closes the watch."""
        params = {
            **self._selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        pending = bytearray()
        async with aclosing(self._get(session, params, None)) as parts:
            async for part in parts:
                pending += part
                if len(pending) > LINE_LIMIT:
                    raise KubeError("an event of the watch is too long")
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                for line in filter(bytes.strip, lines):
                    yield _event(line)

    def _take(self, event: _Event) -> str:
        """Take one event in; returns the version it leads to."""
        try:
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=_Status)
                if status.code == 410:
                    raise Gone
                raise KubeError(f"the watch failed: {status.code} {status.message}")
            if event.type == "BOOKMARK":
                mark = msgspec.json.decode(event.object, type=_Bookmark)
                return mark.metadata.resourceVersion
            one = msgspec.json.decode(event.object, type=Slice)
        except (msgspec.DecodeError, RecursionError) as error:
            raise KubeError(f"an event of the watch cannot be read: {error}") from error
        if event.type == "DELETED":
            self._store.drop(one.metadata.name)
        else:
            self._store.put(one)
        return one.metadata.resourceVersion

    async def _get(
        self, session: aiohttp.ClientSession, params: dict[str, str], limit_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of an answer's body.

        :raises Gone: 410.
        :raises KubeError: no other 200.
        """
        try:
            headers = await asyncio.to_thread(self._headers)
            context = await asyncio.to_thread(self._tls)
            async with (
                asyncio.timeout(limit_s),
                session.get(
                    self._url, params=params, headers=headers, ssl=context, allow_redirects=False
                ) as response,
            ):
                if response.status != 200:
                    raise _refusal(response.status, await response.content.read(4096))
                async for part in response.content.iter_any():
                    yield part
        except TimeoutError as error:
            raise KubeError("the API server does not answer") from error
        except ssl.SSLError as error:
            raise KubeError(f"TLS: {error}"[:300]) from error
        except (aiohttp.ClientError, OSError) as error:
            raise KubeError(f"the API server cannot be reached: {error}"[:200]) from error

    def _headers(self) -> dict[str, str]:
        """The token is read each time: it is replaced about every hour. Blocks."""
        try:
            token = Path(self._config.token_file).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return {}
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _tls(self) -> Any:
        if not self._url.startswith("https:"):
            return True
        if not Path(self._config.ca_file).is_file():
            return ssl.create_default_context()
        return ssl.create_default_context(cafile=self._config.ca_file)


def _event(line: bytes) -> _Event:
    try:
        return msgspec.json.decode(line, type=_Event)
    except (msgspec.DecodeError, RecursionError) as error:
        raise KubeError(f"an event of the watch cannot be read: {error}") from error


def _refusal(status: int, body: bytes) -> Exception:
    if status == 410:
        return Gone()
    try:
        said = " ".join(msgspec.json.decode(body, type=_Status).message.split())
    except (msgspec.DecodeError, RecursionError):
        said = ""
    reason = f"the API server answered {status} {said}".rstrip()
    if status in (401, 403):
        reason += " (the service account needs `list` and `watch` on `endpointslices`)"
    return KubeError(reason[:300])
