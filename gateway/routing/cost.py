"""What serving a request on a worker costs, in seconds; no weights to tune.

    C(w) = wait + own + others + behind + home + memory + decode + failure

    wait     prefill work ahead of it: booked here, and what the engine reports beyond that; and how
             long all answers that have begun there have been silent, if that is unusually long
    own      o + h*b + v*a*(u + q*u*(L - u/2)): h tokens loaded from host memory at b seconds each,
             and its own prefill; u uncached of L prompt tokens, a seconds
             per token of this worker, q the share of attention in it, o fixed per request, and
             v = 1/n^2 for a block below which n different branches are known: one more copy of a
             popular prefix will be used by others, so it is no reason to stay with its first holder
    others   lambda * the same prefill without o: recomputing what another worker holds takes time
             and memory from the whole pool. lambda grows with its load: an idle one can afford
             copies
    behind   r*S*(wait + S/2)/(1 - rho): those who arrive there while this prefill of S seconds is
             waiting or runs have to wait for it, r of them a second; and while they are served, as
             rho of the worker's time is, others arrive. A long prefill is best put where fewest
             will come. One that could as well go elsewhere counts half (gateway.routing.pressure)
    home     share of the mean wait there: the conversation's later turns will meet it. Short
             conversations keep away from where long prefills are, and so do long prefills from them
    memory   time until enough KV is given back, if it does not fit now
    decode   how much the sequences that decode there slow each other down
    place    what a wait for one of the places at which it serves a request is longer than `wait`
             (gateway.routing.places)
    fresh    a worker that joined just now and has its share of requests comes last
    explore  what keeps the cheapest holder from being first, for one request in 100
             (gateway.routing.guards)
    failure  p/(1-p) * (time lost + cost of the second best): chance of having to start over

Where nothing is shared only the load terms differ, so it acts as least-loaded; a prefix that all
workers hold shortens every ``own`` alike. Nothing depends on how full a worker's index is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gateway.routing.base import Candidate, Query, Scored, WorkerView, key_tokens
from gateway.routing.guards import explored, held_back, paid_back
from gateway.routing.places import FEWEST, place_waits
from gateway.routing.ties import in_order

_TURNOVER_S = 60.0
"""Assumed time in which running requests give back a full pool, where no rate is known."""
_SLOWEST_TURNOVER_S = 600.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """The constants of the formula, none of them tuned to a workload."""

    quadratic: float = 2e-5
    """q: attention's share per token of context."""
    least: float = 0.25
    """lambda of an idle pool. Enough that a sibling waits for its leader rather than compute the
    same elsewhere."""
    kappa: float = 4.0
    """How fast lambda grows with the pool's load: as a queue does, with rho / (1 - rho)."""
    most: float = 16.0
    """Largest lambda, reached at a load of 0.8."""
    knee: float = 64.0
    """Sequences decoding together whose weight is that of one token's time."""
    unknown_tpot_s: float = 0.01
    later: float = 0.3
    """Weight of the mean wait, which later turns meet, beside the wait now."""

    def prefill_s(self, uncached: int, total: int, s_per_token: float) -> float:
        """Seconds to prefill ``uncached`` of ``total`` prompt tokens, without the fixed part."""
        return s_per_token * uncached * (1.0 + self.quadratic * (total - uncached / 2))

    def compute_s(self, query: Query, candidate: Candidate) -> float:
        """Seconds of loading and prefill that the request adds to a worker."""
        total = query.prompt_tokens or key_tokens(query)
        matched = candidate.matched_tokens
        uncached = total - matched if matched < total else 0
        pace = candidate.worker.prefill_s_per_token
        prefill = pace * uncached * (1.0 + self.quadratic * (total - uncached / 2))
        return candidate.load_s + prefill if candidate.host_tokens else prefill

    def promised_s(self, query: Query, candidate: Candidate) -> float:
        """Seconds of prefill that others promised to do there for this prompt."""
        total = query.prompt_tokens or key_tokens(query)
        pace = candidate.worker.prefill_s_per_token
        return self.prefill_s(candidate.promised_tokens, total, pace)

    def lost_s(self, query: Query, candidate: Candidate) -> float:
        """As :meth:`compute_s`, without the share that pays itself back."""
        return self._lost_s(query, candidate, self.compute_s(query, candidate))

    @staticmethod
    def _lost_s(query: Query, candidate: Candidate, compute: float) -> float:
        if not candidate.shared_tokens or compute <= (load := candidate.load_s):
            return compute
        total = query.prompt_tokens or key_tokens(query)
        uncached = total - candidate.matched_tokens
        return load + (compute - load) * max(0.0, 1.0 - candidate.shared_tokens / uncached)

    def externality(self, worker: WorkerView) -> float:
        """lambda: what a second of prefill costs others, in seconds."""
        idle = 1.0 - worker.pool_busy
        if idle * self.most <= self.kappa * worker.pool_busy:
            return self.most
        least = self.least + self.kappa * worker.pool_busy / idle
        return self.most if least > self.most else least

    def own_s(self, query: Query, candidate: Candidate) -> float:
        """The request's own time to first token on an idle worker."""
        return candidate.worker.overhead_s + self.compute_s(query, candidate)

    def memory_s(self, candidate: Candidate) -> float:
        """Expected wait for KV memory; 0 if the worker's memory is unknown."""
        worker = candidate.worker
        if not worker.kv_tokens_total:
            return 0.0
        short = candidate.new_kv_tokens - (worker.kv_tokens_total - worker.booked_decode_tokens)
        if short <= 0:
            return 0.0
        rate = worker.release_tokens_per_s or worker.kv_tokens_total / _TURNOVER_S
        return short / max(rate, worker.kv_tokens_total / _SLOWEST_TURNOVER_S)

    def price(self, query: Query, candidate: Candidate) -> tuple[float, dict[str, float]]:
        """The terms that need no other candidate, as the module's text defines them, and their sum.
        One pass without helpers: it runs for each worker of each request."""
        worker, matched = candidate.worker, candidate.matched_tokens
        wait, offered = worker.booked_prefill_s, worker.offered
        # Its own prefill, and what of it is lost.
        total = query.prompt_tokens or key_tokens(query)
        uncached = total - matched if matched < total else 0
        compute = worker.prefill_s_per_token * uncached
        compute *= 1.0 + self.quadratic * (total - uncached / 2)
        if candidate.host_tokens:
            compute = candidate.load_s + compute
        lost = compute
        if candidate.shared_tokens:
            lost = self._lost_s(query, candidate, compute)
        # Those who arrive behind it.
        behind = 0.0
        if offered.bound_per_s:
            behind = offered.bound_per_s * compute * (wait + compute / 2)
            behind /= 1.0 - offered.bound_busy
        own, others = worker.overhead_s + lost, self.externality(worker) * lost
        home = self.later * offered.mean_wait_s
        memory = self.memory_s(candidate) if worker.kv_tokens_total else 0.0
        token_s = worker.tpot_s or self.unknown_tpot_s
        decode = token_s * (worker.inflight + worker.foreign) / self.knee
        return wait + own + others + behind + home + memory + decode, {
            "wait": wait,
            "own": own,
            "others": others,
            "behind": behind,
            "home": home,
            "memory": memory,
            "decode": decode,
        }

    def expected_ttft_s(self, query: Query, candidate: Candidate) -> float:
        """Time to first token if it is sent there now, whatever the policy."""
        worker = candidate.worker
        own = worker.overhead_s + self.compute_s(query, candidate)
        if not worker.kv_tokens_total:
            return worker.booked_prefill_s + own
        return worker.booked_prefill_s + own + self.memory_s(candidate)


class CostPolicy:
    """Cheapest worker first; equal costs are ordered by a hash of the request."""

    name = "cost"

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """All candidates by cost in seconds, with its terms."""
        price, failing, fresh, unbegun = self._model.price, False, False, 0
        costs: list[float] = []
        terms: list[dict[str, float]] = []
        for item in self._paying(query, candidates):
            cost, parts = price(query, item)
            costs.append(cost)
            terms.append(parts)
            worker = item.worker
            if worker.failure_rate:
                failing = True
            if worker.fresh:
                fresh = True
            if (count := worker.inflight + worker.foreign - worker.decoding) > unbegun:
                unbegun = count
        # Terms that need several candidates. Mostly no worker fails or is new, or lacks places.
        if failing:
            self._add_failure(candidates, terms, costs)
        if unbegun >= FEWEST:
            self._add_place(candidates, terms, costs)
        if fresh:
            dearest = max(costs)
            for at in held_back(candidates):
                terms[at]["fresh"] = dearest
                costs[at] += dearest
        return explored(query, in_order(query, list(map(Scored, candidates, costs, terms))))

    @staticmethod
    def _add_place(
        candidates: Sequence[Candidate], terms: list[dict[str, float]], costs: list[float]
    ) -> None:
        workers = [item.worker for item in candidates]
        for at, place_s in enumerate(place_waits(workers)):
            if place_s and (longer := place_s - workers[at].booked_prefill_s) > 0.0:
                terms[at]["place"] = longer
                costs[at] += longer

    def _paying(self, query: Query, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        for item in candidates:
            if item.shared_tokens:
                return paid_back(candidates, lambda item: self._model.promised_s(query, item))
        return candidates

    def _add_failure(
        self, candidates: Sequence[Candidate], terms: list[dict[str, float]], costs: list[float]
    ) -> None:
        base = list(costs)
        for at, candidate in enumerate(candidates):
            others = base[:at] + base[at + 1 :]
            chance = min(candidate.worker.failure_rate, 0.9)
            again = candidate.worker.failure_s + min(others, default=base[at])
            terms[at]["failure"] = chance / (1.0 - chance) * again
            costs[at] += terms[at]["failure"]
