"""What every policy promises, as a check that runs one on made-up fleets.

Ours go through it in the tests, plug-ins when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random

from gateway.routing.base import (
    Candidate,
    Policy,
    Query,
    Scored,
    Trust,
    WorkerState,
    WorkerView,
)
from shared.types import BlockKey, RequestId, WorkerId

_BLOCK = 16


class ContractError(AssertionError):
    """The policy does not keep its promise; the message says which, in one line."""


def check_policy(make: Callable[[], Policy], seed: int = 1, rounds: int = 20) -> None:
    """Run fresh policies on random fleets of 0 to 8 workers.

    - ``rank`` returns each candidate exactly once, as :class:`Scored`, and so none for none;
    - same arguments, own state and RNG state give the same order, also after ``deepcopy``
      (``explain`` ranks with a copy);
    - the query and the candidates stay as they were.

    :raises ContractError: one of these fails. What ``rank`` itself raises passes through.
    """
    rng = Random(seed)
    policy, twin = make(), make()
    for _ in range(rounds):
        query, fleet = random_query(rng), random_fleet(rng)
        before, copied, draw = deepcopy((query, fleet)), deepcopy(policy), rng.getrandbits(32)
        order = _names(fleet, policy.rank(query, fleet, Random(draw)))
        if (query, fleet) != before:
            raise ContractError("rank changes its arguments")
        for other in (twin, copied):
            if _names(fleet, other.rank(query, fleet, Random(draw))) != order:
                raise ContractError("rank gives another order for the same arguments and RNG")


def random_query(rng: Random) -> Query:
    """A prompt of up to 40 blocks, sometimes without tokens or keys, or with a session."""
    granules = rng.choice((0, 1, rng.randrange(40)))
    return Query(
        request_id=RequestId(f"r{rng.getrandbits(32)}"),
        model="m",
        prompt_tokens=rng.choice((0, granules * _BLOCK + rng.randrange(1, _BLOCK))),
        max_tokens=rng.choice((0, 64)),
        arrived=1.0,
        keys=[BlockKey(rng.getrandbits(64)) for _ in range(granules)],
        tenant=rng.choice(("", "t")),
        session=rng.choice(("", "s1", "s2")),
    )


def random_fleet(rng: Random) -> list[Candidate]:
    """0 to 8 workers, idle, busy or equal."""
    equal = rng.random() < 0.2
    candidates = []
    for number in rng.sample(range(100), rng.randrange(9)):
        busy = 0 if equal else rng.choice((0, rng.randrange(200)))
        matched = 0 if equal else rng.randrange(30) * _BLOCK
        worker = WorkerView(
            id=WorkerId(f"w{number}"),
            state=WorkerState.READY,
            trust=rng.choice(list(Trust)),
            block_size=rng.choice((1, 16, 64)),
            inflight=busy,
            booked_prefill_s=busy * rng.random(),
            booked_decode_tokens=busy * rng.randrange(500),
            prefill_s_per_token=1e-4,
            overhead_s=0.005,
            failure_rate=rng.choice((0.0, 0.0, 0.5, 1.0)),
            kv_tokens_total=rng.choice((0, 50_000)),
            foreign=rng.choice((0, 3)),
        )
        candidates.append(
            Candidate(worker, matched, host_tokens=rng.choice((0, matched)), new_kv_tokens=busy)
        )
    return candidates


def _names(fleet: Sequence[Candidate], ranked: object) -> list[WorkerId]:
    if not isinstance(ranked, list) or not all(isinstance(item, Scored) for item in ranked):
        raise ContractError(f"rank returns {type(ranked).__name__}, not a list of Scored")
    names = [item.candidate.worker.id for item in ranked]
    if sorted(names) != sorted(item.worker.id for item in fleet):
        raise ContractError(f"rank returns {len(names)} workers, not each of {len(fleet)} once")
    return names
