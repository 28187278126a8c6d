"""A session stays where it is: the rule of routers that hash a session header."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import xxhash

from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.policies.least_loaded import load_of
from gateway.routing.ties import in_order


class Session:
    """Each session has an order of all workers of its own (highest random weight).

    Nothing is remembered: gateways agree, a restart changes nothing, and when a worker leaves only
    its own sessions move. Two tenants with one session id do not share a place. Requests without a
    session go to the least loaded worker. There is no load guard: that is the rule.
    """

    name = "session"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """By the session's order, else by load."""
        if not query.session:
            return in_order(query, [Scored(item, load_of(item.worker)) for item in candidates])
        tenant = query.tenant.encode("utf-8", "surrogatepass")
        who = b"%d:%b" % (len(tenant), tenant) + query.session.encode("utf-8", "surrogatepass")
        seed = xxhash.xxh3_64_intdigest(who)
        ordered = sorted(
            candidates,
            key=lambda item: (
                xxhash.xxh3_64_intdigest(item.worker.id.encode(), seed),
                item.worker.id,
            ),
        )
        return [Scored(item, float(at)) for at, item in enumerate(ordered)]
