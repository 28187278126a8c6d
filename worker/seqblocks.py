"""The KV blocks of sequences: which they can reuse, get, seal and give back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shared.paging import BlockPool
from worker.sequence import BlockChain, Phase, Sequence


class SequenceBlocks:
    """Keeps each sequence's block table in step with the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._size = pool.block_size
        self._chains: dict[str, BlockChain] = {}

    def enrol(self, seq: Sequence) -> None:
        """Call first, once per sequence."""
        self._chains[seq.id] = BlockChain(seq.scope_root, self._size, seq.salt)

    def dismiss(self, seq: Sequence) -> None:
        """Call last; gives back its blocks."""
        self.give_back(seq)
        del self._chains[seq.id]

    def units(self, seq: Sequence) -> list[bytes]:
        """Exact contents of its full blocks. Do not modify."""
        return self._chains[seq.id].units(seq.tokens)

    def limit(self, seq: Sequence) -> int:
        """Blocks that may come from the cache: full ones, and never one with a token whose logits
        are needed: the last one, or any of a prompt whose log-probabilities were asked for."""
        known = len(seq.scores) if seq.scoring else len(seq.tokens) - 1
        return known // self._size

    def needed(self, n_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-n_tokens // self._size)

    def table(self, seq: Sequence, n_tokens: int) -> tuple[int, ...]:
        """The blocks of its first tokens. They change once a block, not once a step."""
        table = seq.table
        if table is None:
            table = seq.table = tuple(seq.blocks)
        count = self.needed(n_tokens)
        return table if count >= len(table) else table[:count]

    def match(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Reusable blocks that are in the cache now, and the host slots that continue them. Valid
        until the pool changes."""
        units = self.units(seq)[: self.limit(seq)]
        matched = self.pool.match(seq.scope_root, units)
        slots = self.pool.match_host(seq.scope_root, matched, units[len(matched) :])
        seq.reusable = (len(matched) + len(slots)) * self._size
        return matched, slots

    def fits(self, seq: Sequence, spare: int, without: Iterable[Sequence] = ()) -> bool:
        """Whether :meth:`take` would succeed once the blocks of some others were given back."""
        returned = Counter(block for other in without for block in other.blocks)
        refs = self.pool.refs
        freed = {block for block, times in returned.items() if times == refs(block)}
        matched, _ = self.match(seq)
        left = self.pool.available + len(freed)
        left -= self.pool.n_cached_of(matched) + len(freed.intersection(matched))
        return self.needed(len(seq.tokens)) - len(matched) + spare <= left

    def take(self, seq: Sequence, spare: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, as many as possible from the cache.

        :param spare: blocks that must be left for others.
        :returns: False, with no change, if they are not there.
        """
        if not self.fits(seq, spare):
            return False
        matched, slots = self.match(seq)
        fresh = self.needed(len(seq.tokens)) - len(matched)
        self.pool.acquire(matched)
        loaded = self.pool.promote(slots, after=matched[-1] if matched else None)
        held = matched + (loaded or [])
        blocks = self.pool.allocate(fresh - len(slots), after=held[-1] if held else None)
        if loaded is None or blocks is None:
            raise AssertionError(f"{fresh} blocks are not there although they were counted")
        seq.blocks, seq.table = held + blocks, None
        seq.computed = len(held) * self._size
        seq.sealed = len(held)
        seq.loaded = len(loaded) * self._size
        if seq.scoring:
            del seq.scores[seq.computed :]
        return True

    def grow(self, seq: Sequence) -> bool:
        """Make sure the newest token has a place; False if no block is there."""
        if len(seq.tokens) > len(seq.blocks) * self._size:
            fresh = self.pool.allocate(1, after=seq.blocks[-1])
            if fresh is None:
                return False
            seq.blocks.extend(fresh)
            seq.table = None
        return True

    def seal(self, seq: Sequence) -> None:
        """Put computed full blocks into the tree; an equal block that is there already replaces
        the sequence's own."""
        full = seq.computed // self._size
        if full == seq.sealed:
            return
        chain = self._chains[seq.id]
        units = chain.units(seq.tokens)
        seq.table = None
        for index in range(seq.sealed, full):
            parent = seq.blocks[index - 1] if index else None
            seq.blocks[index] = self.pool.seal(
                seq.blocks[index], seq.scope_root, parent, units[index], chain.key(index)
            )
        seq.sealed = full

    def distrust(self, seq: Sequence) -> None:
        """Nobody shall find what a sequence with spoilt KV holds. Where the fault is within what
        no good sample has read, is not known; it may have come from the cache."""
        first = seq.proven // self._size
        if first < seq.sealed:
            self.pool.forget(seq.blocks[first])

    def give_back(self, seq: Sequence) -> None:
        """Release its blocks; sealed ones stay reusable."""
        self.pool.release(seq.blocks)
        seq.blocks, seq.table = [], None
        seq.computed = seq.sealed = seq.proven = 0

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Prove that tables and pool agree; raises AssertionError."""
        self.pool.check()
        holders = [0] * self.pool.n_blocks
        for seq in running:
            if len(seq.blocks) < self.needed(max(seq.computed, len(seq.tokens) - 1)):
                raise AssertionError(f"{seq.id} has too few blocks")
            if seq.sealed != seq.computed // self._size:
                raise AssertionError(f"{seq.id} has unsealed full blocks")
            if seq.table is not None and list(seq.table) != seq.blocks:
                raise AssertionError(f"{seq.id} has an old table")
            for block in seq.blocks:
                holders[block] += 1
        if holders != [self.pool.refs(block) for block in range(self.pool.n_blocks)]:
            raise AssertionError("references and sequences' blocks differ")
        if any(seq.blocks or seq.phase is not Phase.WAITING for seq in waiting):
            raise AssertionError("a waiting sequence holds blocks")
