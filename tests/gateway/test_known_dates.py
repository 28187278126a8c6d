"""The date in a head that was met before may be any date, and nothing else."""

from __future__ import annotations

import pytest

from gateway.wire.known import KnownHead, learn

HEAD = b"HTTP/1.1 200 OK\r\nDate: %b\r\nContent-Length: 2\r\n\r\n"
FIRST, LATER = b"Mon, 01 Jan 2024 00:00:00 GMT", b"Mon, 01 Jan 2024 00:00:01 GMT"


@pytest.fixture
def known() -> KnownHead[str]:
    made = learn(HEAD % FIRST + b"ok", b"HTTP/1.1 200 ", 2, "meaning", dated=True)
    assert made is not None
    return made


@pytest.mark.parametrize("date", [FIRST, LATER, b"Thu, 01 Jan 1970 00:00:00 GMT"])
def test_any_date_will_do_again_and_again(known: KnownHead[str], date: bytes) -> None:
    for told in (date, date, FIRST, date):
        assert known.end_in(HEAD % told + b"ok") == len(HEAD % told)
        assert known.length == 2


@pytest.mark.parametrize(
    "odd",
    [
        b"\n" * 29,
        b"\0" * 29,
        LATER[:-1] + b"\r",
        LATER[:-1],
        LATER + b"x",
        b"Mon, 01 Jan 2024 00:00:00\r\nX: ",
        b"",
    ],
)
def test_what_is_no_date_is_left_to_the_parser(known: KnownHead[str], odd: bytes) -> None:
    for before in (FIRST, LATER):
        assert known.end_in(HEAD % before + b"ok")
        assert known.end_in(HEAD % odd + b"ok") == 0
