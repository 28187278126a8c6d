"""Each log line is one line, and shows no more than it was given (case F08)."""

from __future__ import annotations

import io
import json
import logging
import warnings
from typing import Any

import pytest
import structlog

from shared.logs import configure
from shared.settings import LogConfig

NASTY = 'm\n{"level":"x"}\r\x1b[31m\u2028\x85'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def started(stream: io.StringIO | None = None, **fields: Any) -> io.StringIO:
    target = stream or io.StringIO()
    configure(LogConfig(**fields), target)
    return target


class Unread(io.StringIO):
    """A pipe whose reader has gone: what is written may be refused at once or when flushed."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once

    def write(self, text: str, /) -> int:
        if self.at_once:
            raise BrokenPipeError
        return super().write(text)

    def flush(self) -> None:
        raise BrokenPipeError


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_json_lines_from_both_kinds_of_loggers() -> None:
    stream = started()
    structlog.get_logger("a").info("served", model="m", tokens=5, where=["x"])
    logging.getLogger("lib").warning("odd %s", "thing")
    one, two = map(json.loads, lines(stream))
    assert (one["event"], one["model"], one["tokens"], one["level"]) == ("served", "m", 5, "info")
    assert (two["event"], two["logger"], two["level"]) == ("odd thing", "lib", "warning")
    assert one["timestamp"] < two["timestamp"]


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("fault", ["refused", "refused when flushed", "closed"])
def test_nobody_fails_because_nobody_reads(fault: str, form: str) -> None:
    stream = io.StringIO() if fault == "closed" else Unread(at_once=fault == "refused")
    configure(LogConfig(format=form), stream)
    if fault == "closed":
        stream.close()
    try:
        raise RuntimeError("of its own")
    except RuntimeError:
        structlog.get_logger("a").exception("failed")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_name_with_line_ends_stays_on_its_line(form: str) -> None:
    stream = started(format=form)
    log = structlog.get_logger()
    log.info("served", model=NASTY, inside=[NASTY], error=ValueError(NASTY))
    log.info(NASTY)
    logging.getLogger("lib").warning("%s", NASTY)
    assert len(lines(stream)) == 3
    assert "\x1b" not in stream.getvalue()
    if form == "json":
        assert json.loads(lines(stream)[0])["model"] == NASTY


def test_text_on_a_terminal_and_json_elsewhere() -> None:
    terminal = started(Terminal())
    structlog.get_logger().info("hello", a=1)
    assert "hello" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    assert lines(started()) == []


def test_the_level_holds_for_both() -> None:
    stream = started(level="warning")
    structlog.get_logger().info("no")
    logging.getLogger("lib").info("no")
    structlog.get_logger().warning("yes")
    logging.getLogger("lib").error("yes")
    assert [json.loads(line)["event"] for line in lines(stream)] == ["yes", "yes"]


def test_libraries_that_log_each_request_are_quiet() -> None:
    stream = started(level="info")
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("httpx").info("HTTP Request")
    assert lines(stream) == []
    logging.getLogger("httpx").warning("broken")
    assert len(lines(stream)) == 1


@pytest.mark.parametrize("form", ["json", "text"])
def test_tracebacks_show_no_local_values(form: str) -> None:
    stream = started(Terminal() if form == "text" else None, format=form)
    prompt = "CANARY" + "-PROMPT"
    try:
        raise ValueError("wrong")
    except ValueError:
        structlog.get_logger().exception("failed", size=len(prompt))
        logging.getLogger("lib").exception("failed too")
    assert stream.getvalue().count("ValueError: wrong") == 2
    assert "CANARY-PROMPT" not in stream.getvalue()
    if form == "json":
        assert len(lines(stream)) == 2


def test_what_is_no_json_is_written_as_text() -> None:
    stream = started()
    structlog.get_logger().info("x", thing=object, many={1})
    assert json.loads(lines(stream)[0])["thing"] == "<class 'object'>"


def test_configuring_again_writes_each_line_once() -> None:
    old = started()
    stream = started()
    structlog.get_logger().info("x")
    logging.getLogger("lib").warning("y")
    assert len(lines(stream)) == 2
    assert lines(old) == []


def test_warnings_become_log_lines() -> None:
    stream = started()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "old thing" in json.loads(lines(stream)[0])["event"]


def test_bound_context_is_shown() -> None:
    stream = started()
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("x")
    assert json.loads(lines(stream)[0])["request_id"] == "r1"
