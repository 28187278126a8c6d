"""What most engines have in common, to inherit from."""

from __future__ import annotations

import json
from typing import Any

from gateway.engines.base import (
    Answers,
    Described,
    Frame,
    MalformedFrame,
    Reading,
    Reports,
    Salting,
)
from shared import openai
from shared.jsonsplice import Edit
from shared.openai import Usage


class PlainEngine:
    """An OpenAI server that tells nothing about itself."""

    name = "openai"
    reports = Reports.ALWAYS
    salting = Salting.NONE
    publishes = False
    asks: tuple[str, ...] = ()
    polls: tuple[str, ...] = ()

    def recognises(self, answers: Answers) -> bool:
        """See :class:`gateway.engines.base.Engine`."""
        return not answers

    def describe(self, answers: Answers, host: str) -> Described:
        """See :class:`gateway.engines.base.Engine`."""
        del answers, host
        return Described()

    def read(self, answers: Answers, block_size: int) -> Reading | None:
        """See :class:`gateway.engines.base.Engine`."""
        del answers, block_size
        return None

    def decode(self, payload: bytes) -> Frame:
        """See :class:`gateway.engines.base.Engine`."""
        raise MalformedFrame(f"{self.name} publishes no events, yet {len(payload)} bytes came")

    def usage(self, answer: object) -> Usage | None:
        """See :class:`gateway.engines.base.Engine`."""
        return openai.read_usage(answer)

    def edits(self, raw: bytes, *, recall: bool) -> list[Edit]:
        """See :class:`gateway.engines.base.Engine`."""
        del raw, recall
        return []


def json_object(answers: Answers, *paths: str) -> dict[str, Any]:
    """The JSON object of the first of ``paths`` that gave one; else an empty one."""
    for path in paths:
        body = answers.get(path)
        if body is None:
            continue
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def count(value: object) -> int:
    """A count >= 0 out of JSON; 0 for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(value) if 0 <= value < 1 << 53 else 0


def digits(text: str | None) -> int:
    """A count out of a label; 0 for everything else."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else 0
