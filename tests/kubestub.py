"""A Kubernetes API server for EndpointSlices only: list with pages, watch, bookmarks, 410.

Objects have the form in which kube-apiserver 1.30 tells them (``kubectl get endpointslices -o
json``), with what is of no use here left out.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{ns}/endpointslices"


def endpoint(
    address: str,
    *,
    pod: str = "",
    ready: bool | None = True,
    serving: bool | None = True,
    terminating: bool | None = False,
) -> dict[str, Any]:
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    made: dict[str, Any] = {
        "addresses": [address],
        "conditions": {k: v for k, v in conditions.items() if v is not None},
        "nodeName": "node-1",
        "zone": "eu-1a",
    }
    if pod:
        made["targetRef"] = {"kind": "Pod", "name": pod, "namespace": "llm", "uid": f"uid-{pod}"}
    return made


def slice_of(
    name: str,
    *endpoints: dict[str, Any],
    service: str = "vllm",
    ports: list[dict[str, Any]] | None = None,
    family: str = "IPv4",
    version: str = "1",
) -> dict[str, Any]:
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": f"slice-{name}",
            "resourceVersion": version,
            "generation": 3,
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": service,
            },
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service}],
            "managedFields": [{"manager": "kube-controller-manager", "operation": "Update"}],
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "protocol": "TCP", "port": 8000}] if ports is None else ports,
    }


class KubeStub:
    """Owns slices by name; a change is told to every open watch."""

    def __init__(self) -> None:
        self.version = 100
        self.slices: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 0
        """Versions before this are gone: 410."""
        self.page = 500
        self.status = 200
        """Anything else is answered to everybody."""
        self.requests: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.url = ""
        self._changed = asyncio.Event()
        self._cut = 0
        self._runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.cut()
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def lists(self) -> int:
        return sum("watch" not in asked for asked in self.requests)

    def put(self, one: dict[str, Any]) -> None:
        kind = "MODIFIED" if one["metadata"]["name"] in self.slices else "ADDED"
        self._note(kind, one)
        self.slices[one["metadata"]["name"]] = one

    def delete(self, name: str) -> None:
        self._note("DELETED", self.slices.pop(name))

    def bookmark(self) -> None:
        self._note("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    def forget(self) -> None:
        """etcd was compacted: no watch can begin at an older version, and open ones break."""
        self.version += 10
        self.oldest = self.version
        self.cut()

    def cut(self) -> None:
        """End all open watches."""
        self._cut += 1
        self._changed.set()

    def _note(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, one))
        self._changed.set()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.status != 200:
            body = {"kind": "Status", "code": self.status, "message": f"status {self.status}"}
            return web.json_response(body, status=self.status)
        if "watch" in request.query:
            return await self._watch(request)
        begin = int(request.query.get("continue") or 0)
        every = list(self.slices.values())
        page = min(self.page, int(request.query["limit"]))
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if begin + page < len(every):
            metadata |= {"continue": str(begin + page), "remainingItemCount": 1}
        items = every[begin : begin + page]
        return web.json_response(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": metadata,
                "items": items,
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        at, cut = int(request.query["resourceVersion"]), self._cut
        if at < self.oldest:
            status = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        while cut == self._cut:
            for version, kind, one in self.history:
                if version > at:
                    line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
                    # in two pieces, as a proxy may cut it
                    await response.write(line[:40])
                    await response.write(line[40:])
                    at = version
            self._changed.clear()
            await self._changed.wait()
        return response
