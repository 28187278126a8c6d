"""Typed settings: defaults < TOML file < environment < flags, into frozen structs.

Unknown keys are an error with a suggestion; every error names the key, the value and the reason.
The loading itself is in ``shared.layers``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.layers import load

__all__ = ["DeploymentConfig", "GuardedListener", "LogConfig", "RedisConfig", "doc", "load"]


def doc(text: str) -> msgspec.Meta:
    """One line for ``docs/configuration.md`` and ``--help``."""
    return msgspec.Meta(description=text)


class GuardedListener(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys and certificates of a process's listeners: the last fields of its listener section."""

    api_keys: Annotated[
        tuple[str, ...], doc("If not empty, requests need one of these as bearer token.")
    ] = ()
    tls_cert: Annotated[
        str, doc("PEM file: both listeners speak TLS with this certificate; empty: plain HTTP.")
    ] = ""
    tls_key: Annotated[str, doc("PEM file of its key.")] = ""
    tls_client_ca: Annotated[
        str, doc("PEM file: clients of the public listener need a certificate of this authority.")
    ] = ""


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shared index. Optional at run time: without it routing goes on from local knowledge."""

    url: Annotated[
        str,
        doc(
            "redis://, rediss://, unix://, redis+cluster:// or redis+sentinel:// URL "
            "(docs/redis.md); 'none' works without Redis."
        ),
    ] = "none"
    timeout_ms: Annotated[
        Annotated[float, msgspec.Meta(gt=0)], doc("A command without a reply by then failed.")
    ] = 500.0


class DeploymentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What gateways and workers of one deployment must agree on."""

    name: Annotated[
        Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")],
        doc("Namespace of all Redis keys."),
    ] = "headwater"
    secret: Annotated[
        str,
        doc("Keys the block hashes, the same in all processes; empty takes the name."),
    ] = ""

    @property
    def hash_key(self) -> bytes:
        """Key of the hash chain's root."""
        return (self.secret or self.name).encode()


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenTelemetry traces; needs the extra ``otel``."""

    otlp_endpoint: Annotated[
        str,
        doc(
            "URL that a collector takes traces at, OTLP over HTTP, e.g. "
            "http://otel:4318/v1/traces; empty: none are made."
        ),
    ] = ""
    sample: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)],
        doc(
            "Share of requests without a trace that begin one, in the gateway; a worker begins "
            "none. Those that come with one follow it."
        ),
    ] = 1.0


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log lines go to stderr, one JSON object each, or readable text on a terminal."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("Least level shown.")] = (
        "info"
    )
    format: Annotated[
        Literal["auto", "json", "text"], doc("auto is text on a terminal and JSON elsewhere.")
    ] = "auto"
