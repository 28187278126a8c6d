"""Redis Cluster, Sentinel, TLS and users with few rights: feeds and worker through all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from depth import DEPTH
from redisrig import Cluster, Sentinels, certificates, kinds, proxy, talk

from shared.redislink import RedisLink, RedisLost
from shared.slots import slot_of

pytestmark = pytest.mark.redis

GATEWAY_COMMANDS = (
    "+client|setname +role +time +cluster|slots +smembers +hgetall +hmget +mget +pttl +xread "
    "+xinfo|stream +set +sadd +srem +pexpire +xadd"
)
WORKER_COMMANDS = (
    "+multi +exec +hset +pexpire +sadd +srem +set +del +unlink +xadd +cluster|slots +client|setname"
)


@pytest.fixture(scope="module", params=kinds("oldest"))
def cluster(request, tmp_path_factory):
    made = Cluster.start(tmp_path_factory.mktemp("cluster"), request.param)
    yield made
    made.stop()


@pytest.fixture
def beside(kit, worker_process):
    """``beside(url)``: a real worker that publishes there, and the feeds of a gateway."""

    def start(url: str) -> SimpleNamespace:
        env = {"HEADWATER_DEPLOYMENT__NAME": "t", "HEADWATER_REDIS__TIMEOUT_MS": "2000"}
        worker = worker_process("--redis", url, env=env)
        return SimpleNamespace(
            worker=worker, running=kit.running(kit.settings(url, timeout_ms=2000))
        )

    return start


async def by_redis(kit, gateway) -> None:
    """One worker is known from Redis, and its events come from there."""
    router = gateway.router
    await kit.until(lambda: any(router.exact(w, "redis") for w in router.infos), 20)


@pytest.mark.parametrize("form", ["several nodes", "one node"])
async def test_a_worker_and_a_gateway_meet_in_a_cluster(kit, beside, cluster, form) -> None:
    url = cluster.url if form == "several nodes" else cluster.masters[1].url
    made = beside(url)
    async with made.running as gateway, kit.running(kit.settings(cluster.url), "g2") as other:
        await by_redis(kit, gateway)
        await by_redis(kit, other)
        await kit.until(lambda: gateway.stats.peers == other.stats.peers == 1)
        assert gateway.stats.redis_outages == other.stats.redis_outages == 0
        assert gateway.stats.task_failures == 0
    for node in cluster.masters:
        errors = talk(node.port, "INFO", "errorstats")
        assert not any("CROSSSLOT" in str(name) for name in errors)


async def test_workers_of_all_shards_are_known_in_a_cluster(kit, cluster) -> None:
    link = RedisLink(cluster.url, 2.0)
    names = [f"w{number}" for number in range(64)]
    assert len({kit.keys.shard_of(name) for name in names}) == kit.keys.shards
    for name in names:
        await link.transact(
            [("HSET", kit.keys.worker(name), "a", name), ("PEXPIRE", kit.keys.worker(name), 9000)]
        )
    replies = await link.call([("HGETALL", kit.keys.worker(name)) for name in names])
    assert replies == [[b"a", name.encode()] for name in names]
    assert len(link._wires) == 3
    await link.drop()


async def test_slots_that_move_are_followed(kit, cluster) -> None:
    """``MOVED`` and ``ASK``, for single commands and for transactions."""
    source, target, *_ = cluster.masters
    link = RedisLink(cluster.url, 2.0)
    key = next(f"k{n}" for n in range(1000) if slot_of(f"k{n}") < 16384 // 3)
    slot = slot_of(key)
    assert await link.call([("SET", key, "1")]) == [b"OK"]
    ids = [talk(node.port, "CLUSTER", "MYID").decode() for node in (source, target)]
    talk(target.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    talk(source.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    absent = next(f"{{{key}}}{n}" for n in range(10))
    # Not at the source: it may be at the target already, and new ones are made there.
    assert await link.call([("SET", absent, "2"), ("GET", key), ("GET", absent)]) == [
        b"OK",
        b"1",
        b"2",
    ]
    talk(source.port, "MIGRATE", "127.0.0.1", target.port, key, 0, 1000)
    assert await link.call([("GET", key)]) == [b"1"]
    with pytest.raises(RedisLost):
        await link.transact([("SET", key, "3"), ("SET", absent, "3")])
    for node in (target, source, cluster.masters[2]):
        talk(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    assert await link.call([("GET", key)]) == [b"1"]
    talk(target.port, "CLUSTER", "SETSLOT", slot, "STABLE")
    stale = RedisLink(cluster.url, 2.0)
    assert await stale.call([("GET", key)]) == [b"1"]
    stale._slots.moved(slot, link._slots.host(0) if slot else link._slots.host(1))
    assert await stale.transact([("SET", key, "4"), ("SET", absent, "4")]) == [b"OK", b"OK"]
    assert await link.call([("GET", key)]) == [b"4"]
    await link.drop()
    await stale.drop()
    # Back, for the tests after this one.
    for name in (key, absent):
        talk(target.port, "DEL", name)
    for node in cluster.masters:
        talk(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ids[0])


async def test_a_cluster_survives_the_death_of_a_master(kit, beside, tmp_path) -> None:
    cluster = Cluster.start(tmp_path / "c", replicas=True)
    try:
        made = beside(cluster.url)
        async with made.running as gateway:
            await by_redis(kit, gateway)
            name = next(iter(gateway.router.infos))
            shard = kit.keys.log(kit.keys.shard_of(name))
            owner = cluster.masters[slot_of(shard) * 3 // 16384]
            owner.process.kill()
            await kit.until(lambda: not gateway.stats.redis_up, 10)
            await kit.until(lambda: gateway.stats.redis_up, 30)
            await kit.until(lambda: gateway.router.exact(name, "redis"), 20)
            assert gateway.router.left == []
    finally:
        cluster.stop()


async def test_sentinels_name_the_master_before_and_after_a_failover(kit, beside, tmp_path) -> None:
    sentinels = Sentinels.start(tmp_path / "s")
    try:
        made = beside(sentinels.url)
        async with made.running as gateway:
            await by_redis(kit, gateway)
            name = next(iter(gateway.router.infos))
            sentinels.servers[0].process.kill()
            await kit.until(lambda: not gateway.stats.redis_up, 10)
            await kit.until(lambda: gateway.stats.redis_up, 30)
            await kit.until(lambda: gateway.router.exact(name, "redis"), 20)
            # Each finds the new master at its own time: the gateway can read there what the worker
            # had told the old one, before the worker comes. It must come before that lapses.
            port = sentinels.servers[1].port
            for who in ("headwater-gateway", "headwater-worker"):
                await kit.until(lambda who=who: who in str(talk(port, "CLIENT", "LIST")), 30)
            assert gateway.router.left == []
    finally:
        sentinels.stop()


async def test_a_master_that_no_sentinel_knows(tmp_path) -> None:
    sentinels = Sentinels.start(tmp_path / "s", n=1)
    try:
        link = RedisLink(sentinels.url.replace("/main", "/other"), 1.0)
        with pytest.raises(RedisLost, match="knows no master of that name"):
            await link.call([("PING",)])
        link = RedisLink(sentinels.url, 1.0)
        assert await link.call([("PING",)]) == [b"PONG"]
        await link.drop()
    finally:
        sentinels.stop()


@pytest.mark.parametrize("ask_client", [True] if DEPTH == 1 else [False, True])
async def test_tls(kit, beside, redis_server_factory, tmp_path, ask_client) -> None:
    server, papers = redis_server_factory("newest"), certificates(tmp_path)
    with proxy(server.port, papers.front(ask_client=ask_client)) as front:
        plain = front.url.replace("redis://", "rediss://")
        with pytest.raises(RedisLost, match=r"(?i)certificate verify failed"):
            await RedisLink(plain, 2.0).call([("PING",)])
        trusted = f"{plain}?ssl_ca_certs={papers.authority}"
        if ask_client:
            with pytest.raises(RedisLost):
                await RedisLink(trusted, 2.0).call([("PING",)])
            trusted += f"&ssl_certfile={papers.client}&ssl_keyfile={papers.client_key}"
        made = beside(trusted)
        async with made.running as gateway:
            await by_redis(kit, gateway)
        assert front.made >= 5


@pytest.mark.parametrize("kind", kinds("oldest"))
async def test_users_with_only_the_documented_rights(
    kit, worker_process, redis_server_factory, kind
) -> None:
    server = redis_server_factory(kind)
    rights = {"front": GATEWAY_COMMANDS, "back": WORKER_COMMANDS, "none": "+role"}
    for name, commands in rights.items():
        # `cluster|slots` and `xinfo|stream`: from 6.2 on.
        rule = ("on", ">pa/ss", "resetchannels", "~hw:{t.*", "-@all", *commands.split())
        talk(server.port, "ACL", "SETUSER", name, *rule)
    talk(server.port, "ACL", "SETUSER", "default", "-@all", "+acl")

    def url(user: str) -> str:
        return server.url.replace("redis://", f"redis://{user}:pa%2Fss@")

    worker_process("--redis", url("back"), env={"HEADWATER_DEPLOYMENT__NAME": "t"})
    async with kit.running(kit.settings(url("front"), timeout_ms=2000)) as gateway:
        await by_redis(kit, gateway)
        assert gateway.stats.redis_outages == 0
        denied = str(talk(server.port, "ACL", "LOG"))
        assert "front" not in denied
        assert "back" not in denied
    async with kit.running(kit.settings(url("none"), timeout_ms=2000)) as gateway:
        await kit.until(lambda: "permission" in gateway.stats.redis_reason.lower())
    async with kit.running(
        kit.settings(url("front").replace("pa%2F", "x"), timeout_ms=2000)
    ) as gateway:
        await kit.until(lambda: gateway.stats.redis_reason)
        assert not gateway.stats.redis_up
        assert "pa/ss" not in gateway.stats.redis_reason
