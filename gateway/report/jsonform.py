"""The report as JSON: the fields of :class:`gateway.report.model.Report`, times in seconds."""

from __future__ import annotations

import msgspec

from gateway.report.model import Report


def to_json(report: Report, *, indent: int = 2) -> str:
    """One JSON object and a newline; ``indent=0`` puts it on one line."""
    encoded = msgspec.json.encode(report)
    return msgspec.json.format(encoded, indent=indent or -1).decode() + "\n"
