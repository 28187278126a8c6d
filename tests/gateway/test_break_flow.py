"""Requests that a worker refused were not prefilled: they carry no tokens, whatever was warm."""

from __future__ import annotations

import pytest
from routerkit import Rig, failed, ok

from gateway.records import Outcome, TokenFlow


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
def test_a_refused_request_has_no_tokens(status: int) -> None:
    rig = Rig(workers=1)
    warm = rig.prompt(20)
    rig.begin(warm).finish(ok(), rig.now)
    refused = rig.begin(warm).finish(failed(status, Outcome.CLIENT_ERROR), rig.now)
    assert (refused.final, refused.status, refused.flow) == (True, status, TokenFlow())


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE, Outcome.DEADLINE, Outcome.UPSTREAM_ERROR])
def test_what_may_have_been_computed_is_counted(outcome: Outcome) -> None:
    rig = Rig(workers=1)
    record = rig.begin(rig.prompt(20)).finish(failed(500, outcome), rig.now)
    assert record.flow.prompt > 0
    record.flow.check()
