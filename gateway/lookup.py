"""What the workers hold of a prompt: index, promises and what is believed, put together.

Only reads: what is known changes in :mod:`gateway.knowledge`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gateway.expectation import text_tokens
from gateway.ghosts import GhostMemory
from gateway.held import Held
from gateway.index.base import Match, PrefixIndex
from gateway.learnedplaces import aside
from gateway.member import Member
from gateway.promises import Promises
from gateway.routing.base import BLIND, EXACT, LEARNED, Query, Trust
from gateway.routing.branches import NOBODY, Branches
from gateway.scopes import Scopes
from gateway.trust import TrustBook
from shared.blocks import GRANULE, usable_tokens
from shared.types import BlockKey, WorkerId


class LookUp:
    """Looks in all places where something of a prompt may be known. Part of ``Knowledge``."""

    def __init__(
        self,
        index: PrefixIndex,
        trust: TrustBook,
        promises: Promises,
        ghosts: GhostMemory,
        scopes: Scopes,
        branches: Branches,
    ) -> None:
        self._index, self._trust, self._promises = index, trust, promises
        self._ghosts, self._scopes, self._branches = ghosts, scopes, branches
        self._matched: tuple[Sequence[BlockKey], Mapping[WorkerId, Match]] = (), {}
        """The prompt that was looked up last, and where it was found."""

    def held(
        self,
        query: Query,
        serving: Sequence[Member],
        exclude: Collection[WorkerId],
        now: float,
    ) -> Held:
        """Usable tokens everywhere. Promises on ``exclude`` are the request's own: not counted."""
        if query.prompts:
            return Held.of_list([self._held(one, serving, exclude, now) for one in query.prompts])
        return self._held(query, serving, exclude, now)

    def _held(
        self,
        query: Query,
        serving: Sequence[Member],
        exclude: Collection[WorkerId],
        now: float,
    ) -> Held:
        keys, text = query.keys, not query.prompt_tokens
        trust: dict[WorkerId, Trust] = {}
        usable: dict[WorkerId, int] = {}
        promised: dict[WorkerId, int] = {}
        host: dict[WorkerId, int] = {}
        watch_of = self._trust.watch
        if not keys:
            self._matched = keys, {}
            for member in serving:
                watch = watch_of(member.id)
                state = BLIND if watch is None else watch.state
                trust[member.id] = LEARNED if text and state is EXACT else state
                usable[member.id] = 0
            return Held(query.prompt_tokens, usable, host, promised, trust, 0, NOBODY)
        total = query.prompt_tokens or text_tokens(query)
        matches = self._index.match(keys)
        self._matched = keys, matches
        self._promises.expire(now)
        expected = self._promises.workers()
        stride = serving[0].stride
        for member in serving:
            worker, granules, tokens = member.id, 0, 0
            if member.stride < stride:
                stride = member.stride
            watch = watch_of(worker)
            state = BLIND if watch is None else watch.state
            # Events never speak of text.
            trust[worker] = LEARNED if text and state is EXACT else state
            if watch is not None and state is not BLIND:
                beside = watch.told is EXACT and (text or state is not EXACT)
                match = matches.get(aside(worker) if beside else worker)
                if match is not None:
                    granules = match.tokens // GRANULE
                    tokens = _usable(member, granules, total)
                    if match.host_tokens:
                        on_device = (match.tokens - match.host_tokens) // GRANULE
                        host[worker] = tokens - _usable(member, on_device, total)
                if worker in expected and worker not in exclude:
                    ahead = self._promises.extend(worker, keys, granules)
                    if ahead > granules:
                        more = _usable(member, ahead, total)
                        promised[worker] = more - tokens
                        tokens = more
            usable[worker] = tokens
        seen = self._ghosts.seen(keys) // stride * stride * GRANULE
        salted = query.plain_keys or self._scopes.in_use
        isolated = self._isolated(query, serving, total) if salted else {}
        popularity = self._branches.popularity(keys)
        return Held(total, usable, host, promised, trust, seen, popularity, isolated)

    def _isolated(
        self, query: Query, serving: Sequence[Member], total: int
    ) -> Mapping[WorkerId, int]:
        """What workers hold of the same tokens without a salt, or under another one."""
        salted = bool(query.plain_keys)
        plain = query.plain_keys if salted else query.keys
        found: dict[WorkerId, int] = {}
        copies = self._scopes.copies(plain)
        for keys in (plain if salted else (), copies):
            matches = self._index.match(keys) if keys else {}
            for member in serving:
                match = matches.get(member.id) or matches.get(aside(member.id))
                if match is not None:
                    tokens = _usable(member, match.tokens // GRANULE, total)
                    found[member.id] = max(found.get(member.id, 0), tokens)
        return found

    def at(self, place: WorkerId, query: Query, member: Member) -> int:
        """Usable tokens in one place of the index; promises are not counted."""
        return sum(self._at(place, one, member) for one in query.prompts or (query,))

    def _at(self, place: WorkerId, query: Query, member: Member) -> int:
        keys, matches = self._matched
        if keys is not query.keys:
            matches = self._index.match(query.keys)
        match = matches.get(place)
        granules = 0 if match is None else match.tokens // GRANULE
        return _usable(member, granules, query.prompt_tokens or text_tokens(query))


def _usable(member: Member, granules: int, prompt_tokens: int) -> int:
    """Granules held -> tokens that the worker can reuse: whole blocks, without the last token."""
    if not granules:
        return 0
    # Units of keys are whole blocks: nothing else to be rounded down as in `usable_tokens`.
    stride = member.stride
    whole = granules // stride * stride * GRANULE
    return usable_tokens(whole, prompt_tokens, member.info.block_size)
