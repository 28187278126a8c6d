"""EndpointSlices as the API server tells them, brought together into one list. Pure.

One pod may be in several slices (while it moves between them, and once per address family): it is
one worker, by its IPv4 address if it has one.

    terminating                  drains
    not ready, others are        drains: somebody took it out
    not ready, and so are all    the probes decide: the control plane may have lost the nodes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from gateway.config import KubernetesConfig
from gateway.discovery.base import Listing

SERVICE_LABEL = "kubernetes.io/service-name"
TERMINATING = "its pod is terminating"
NOT_READY = "not ready in Kubernetes"


class Metadata(msgspec.Struct):
    """What of an object's metadata is used."""

    name: str = ""
    resourceVersion: str = ""
    labels: dict[str, str] | None = None
    continue_: str | None = msgspec.field(name="continue", default=None)


class Conditions(msgspec.Struct):
    """Absent means unknown, which is to be read as ready."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct):
    """The pod behind an endpoint."""

    uid: str = ""


class Endpoint(msgspec.Struct):
    """One pod's addresses (all but the first are to be ignored)."""

    addresses: list[str] = []
    conditions: Conditions | None = None
    targetRef: TargetRef | None = None


class SlicePort(msgspec.Struct):
    """One port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct):
    """``discovery.k8s.io/v1`` EndpointSlice."""

    metadata: Metadata
    addressType: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[SlicePort] | None = None

    @property
    def service(self) -> str:
        """Name of the service that it belongs to."""
        return (self.metadata.labels or {}).get(SERVICE_LABEL, "")


class SliceList(msgspec.Struct):
    """One page of a list."""

    metadata: Metadata
    items: list[Slice] | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """One endpoint in one slice."""

    service: str
    pod: str
    family: str
    url: str
    ready: bool
    terminating: bool


class SliceStore:
    """All slices that are known now."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._slices: dict[str, Slice] = {}

    def replace(self, slices: Iterable[Slice]) -> None:
        """A whole list was read."""
        self._slices = {one.metadata.name: one for one in slices}

    def put(self, one: Slice) -> None:
        """A slice is new or changed."""
        self._slices[one.metadata.name] = one

    def drop(self, name: str) -> None:
        """A slice is gone."""
        self._slices.pop(name, None)

    def problems(self) -> list[str]:
        """Slices whose port cannot be told."""
        return [
            f"EndpointSlice {one.metadata.name} has {_ports(one)}: set discovery.kubernetes.port"
            for one in self._slices.values()
            if one.endpoints and self._port(one) is None
        ]

    def listing(self) -> Listing:
        """All workers, each once."""
        pods: dict[tuple[str, str], _Seen] = {}
        for seen in self._endpoints():
            key = (seen.service, seen.pod)
            before = pods.get(key)
            pods[key] = seen if before is None else _better(before, seen)
        alive = {pod.service for pod in pods.values() if pod.ready and not pod.terminating}
        workers: dict[str, str] = {}
        for pod in pods.values():
            drain = ""
            if pod.terminating:
                drain = TERMINATING
            elif not pod.ready and pod.service in alive:
                drain = NOT_READY
            # behind two services it is one worker, and takes requests if one of them says so
            known = workers.get(pod.url, drain)
            workers[pod.url] = drain and known
        return Listing(workers)

    def _endpoints(self) -> Iterator[_Seen]:
        for one in self._slices.values():
            port = self._port(one)
            if port is None or one.addressType not in ("IPv4", "IPv6"):
                continue
            for endpoint in one.endpoints or ():
                if not endpoint.addresses:
                    continue
                address = endpoint.addresses[0]
                host = f"[{address}]" if ":" in address else address
                state = endpoint.conditions or Conditions()
                ref = endpoint.targetRef
                yield _Seen(
                    service=one.service,
                    pod=ref.uid if ref is not None and ref.uid else address,
                    family=one.addressType,
                    url=f"{self._config.scheme}://{host}:{port}",
                    ready=state.ready is not False,
                    terminating=state.terminating is True,
                )

    def _port(self, one: Slice) -> int | None:
        """The workers' port in a slice; None if it cannot be told."""
        wanted, ports = self._config.port, one.ports or []
        if wanted.isdigit():
            number = int(wanted)
            return number if not ports or any(p.port == number for p in ports) else None
        if wanted:
            return next((p.port for p in ports if p.name == wanted), None)
        return ports[0].port if len(ports) == 1 else None


def _better(one: _Seen, other: _Seen) -> _Seen:
    """Which of two sights of a pod counts: the one that is ready, then the one by IPv4."""

    def rank(seen: _Seen) -> tuple[bool, bool, bool]:
        return (seen.family == "IPv4", not seen.terminating, seen.ready)

    if one.family == other.family:
        return max(one, other, key=rank)
    return one if one.family == "IPv4" else other


def _ports(one: Slice) -> str:
    if not one.ports:
        return "no port"
    return "the ports " + ", ".join(f"{p.name or '-'} ({p.port})" for p in one.ports)
