"""How long answers usually are: of a pool, and of each tenant there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

_FIRST = 128.0
_POOL_WEIGHT = 0.05
_TENANT_WEIGHT = 0.1
_MOST_TENANTS = 4096


class Outputs:
    """Running means in tokens. A tenant starts from its pool's mean.

    :param most_tenants: (pool, tenant) pairs kept; those not heard of for longest go first.
    """

    def __init__(self, most_tenants: int = _MOST_TENANTS) -> None:
        self._most = most_tenants
        self._pools: dict[str, float] = {}
        self._tenants: OrderedDict[tuple[str, str], float] = OrderedDict()

    def usual(self, pool: str, tenant: str = "") -> float:
        """Usual length of an answer; without a tenant, of all of them. Pure."""
        mean = self._pools.get(pool, _FIRST)
        return self._tenants.get((pool, tenant), mean) if tenant else mean

    def observe(self, pool: str, tenant: str, tokens: int) -> None:
        """An answer has ended."""
        if tenant:
            usual = self.usual(pool, tenant)
            self._tenants[pool, tenant] = usual + _TENANT_WEIGHT * (tokens - usual)
            self._tenants.move_to_end((pool, tenant))
            if len(self._tenants) > self._most:
                self._tenants.popitem(last=False)
        mean = self._pools.get(pool, _FIRST)
        self._pools[pool] = mean + _POOL_WEIGHT * (tokens - mean)

    def keep(self, pools: Collection[str]) -> None:
        """Forget all pools but these."""
        self._pools = {pool: mean for pool, mean in self._pools.items() if pool in pools}
        for pair in [pair for pair in self._tenants if pair[0] not in pools]:
            del self._tenants[pair]
