"""Tenants: keys, salts that clients can narrow and never choose, limits that close exactly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import GatewayConfig, ListenConfig, TenancyConfig
from gateway.exchange import error_answer
from gateway.keysfile import read_keys
from gateway.openers import check_config, open_tenants
from gateway.tenancy import Limits, Meters, Tenant, Tenants, digest, plain_keys
from shared.errors import ConfigError, RateLimited

A, B = Tenant(name="a", scope=b"tenant:a"), Tenant(name="b", scope=b"tenant:b")
SHARED = Tenant(name="s", scope=b"")


def tenants(*, isolate: bool = True, secret: bytes = b"k") -> Tenants:
    keys = {digest(one.name.encode()): one for one in (A, B, SHARED)}
    return Tenants(keys, secret, isolate=isolate)


@given(st.text(), st.text())
def test_salts_keep_tenants_and_their_own_salts_apart(one: str, two: str) -> None:
    book = tenants()
    assert book.salt("a", one) != book.salt("b", two)
    assert (book.salt("a", one) == book.salt("a", two)) is (one == two)
    # Not even one that knows another's salt and sends it as its own.
    assert book.salt("b", book.salt("a", one)) != book.salt("a", one)


@given(st.binary(max_size=6), st.text(max_size=6), st.binary(max_size=6), st.text(max_size=6))
def test_no_scope_ends_where_a_salt_begins(one: bytes, own: str, two: bytes, other: str) -> None:
    def salt(scope: bytes, client: str) -> str:
        tenant = Tenant(name="t", scope=b"x" + scope)
        return Tenants({b"": tenant}, b"k", isolate=True).salt("t", client)

    assert (salt(one, own) == salt(two, other)) is ((one, own) == (two, other))


def test_who_needs_no_salt() -> None:
    assert tenants().salt("s", "mine") == "mine"
    assert tenants().salt("", "mine") == "mine"
    assert tenants(isolate=False).salt("a", "") == ""
    assert tenants(secret=b"k").salt("a", "") != tenants(secret=b"j").salt("a", "")
    assert not Tenants({}, b"k", isolate=True).isolating


def test_keys_are_known_by_their_digest() -> None:
    book = tenants()
    assert book.of_key(b"a") == A
    assert book.of_key(b"A") is None
    assert book.of_key(b"") is None
    assert "b'a'" not in repr(vars(book))


def test_a_key_keeps_its_scope_wherever_it_stands() -> None:
    one = plain_keys(["x", "y"], Limits())
    two = plain_keys(["z", "y", "x"], Limits())
    for key in (b"x", b"y"):
        assert one[digest(key)].scope == two[digest(key)].scope
    assert len({tenant.scope for tenant in two.values()}) == 3


@pytest.mark.parametrize("name", ["key1", "key2"])
def test_no_name_stands_for_a_plain_key_and_for_a_tenant_of_the_file(
    name: str, tmp_path: Path
) -> None:
    """Salts and limits go by name: both would share their caches."""
    file = tmp_path / "keys.toml"
    config = GatewayConfig(
        listen=ListenConfig(api_keys=("x", "y")), tenancy=TenancyConfig(keys_file=str(file))
    )
    file.write_text('[[keys]]\nkey = "z"\ntenant = "key3"\n')
    check_config(config)
    book = open_tenants(config)
    found = {book.of_key(key) for key in (b"x", b"y", b"z")}
    assert len({book.salt(tenant.name, "") for tenant in found if tenant}) == 3
    file.write_text(f'[[keys]]\nkey = "z"\ntenant = "{name}"\n')
    for use in (check_config, open_tenants):
        with pytest.raises(ConfigError, match=rf"tenancy\.keys_file: .*'{name}'"):
            use(config)


@given(st.floats(0.001, 5000))
def test_who_comes_again_after_the_time_in_the_header_is_not_too_early(seconds: float) -> None:
    headers = dict(error_answer(RateLimited("no", retry_after_s=seconds)).headers)
    assert seconds <= int(headers["Retry-After"]) < seconds + 1


def refused(meters: Meters, limits: Limits, size: int, now: float) -> float:
    """Seconds after which it would pass; 0: it passed."""
    try:
        meters.enter("a", limits, size, now)
    except RateLimited as error:
        return error.retry_after_s or 0.0
    return 0.0


@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 3000)), min_size=1, max_size=60),
    st.floats(1, 100),
    st.floats(500, 5000),
)
def test_limits_let_through_what_they_say_and_tell_when_to_come_again(
    asked: list[tuple[float, int]], rate: float, token_rate: float
) -> None:
    meters = Meters()
    limits = Limits(requests_per_minute=rate, prompt_tokens_per_minute=token_rate)
    now, passed, tokens, largest = 0.0, 0, 0, max(size for _, size in asked)
    for gap, size in asked:
        now += gap
        for _ in range(2):  # each limit refuses at most once
            wait = refused(meters, limits, size, now)
            assert wait <= 60 * (1 + largest / token_rate)
            if not wait:
                break
            now += wait + 1e-6
        else:
            assert refused(meters, limits, size, now) == 0.0
        meters.leave("a")
        passed, tokens = passed + 1, tokens + size
        assert passed <= max(1.0, rate) + rate * now / 60 + 1e-3
        # One prompt may be larger than all that is allowed in a minute.
        assert tokens <= token_rate * (1 + now / 60) + largest + 1e-3
    assert meters.running("a") == 0


def test_so_many_at_a_time() -> None:
    meters, limits = Meters(), Limits(concurrent=2)
    meters.enter("a", limits, 0, 0.0)
    meters.enter("a", limits, 0, 0.0)
    meters.enter("b", limits, 0, 0.0)
    with pytest.raises(RateLimited) as failure:
        meters.enter("a", limits, 0, 1.0)
    assert failure.value.code == "concurrency_limit"
    meters.leave("a")
    meters.enter("a", limits, 0, 1.0)
    assert (meters.running("a"), meters.running("b")) == (2, 1)


FILE = """
[[keys]]
sha256 = "{}"
tenant = "search"
[[keys]]
key = "plain"
tenant = "mail"
[tenants.search]
requests_per_minute = 5
group = "shop"
[tenants.mail]
shared = true
concurrent = 3
"""


def test_the_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE.format(hashlib.sha256(b"secret").hexdigest().upper()))
    found = read_keys(TenancyConfig(keys_file=str(file), requests_per_minute=9.0))
    search, mail = found[digest(b"secret")], found[digest(b"plain")]
    assert search == Tenant(
        name="search", scope=b"group:shop", limits=Limits(requests_per_minute=5.0)
    )
    assert mail == Tenant(
        name="mail", scope=b"", limits=Limits(requests_per_minute=9.0, concurrent=3)
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("[[keys", "no valid TOML"),
        ('[[keys]]\ntenant = "x"', "needs either"),
        ('[[keys]]\ntenant = "x"\nkey = "CANARY"\nsha256 = "' + "0" * 64 + '"', "needs either"),
        ('[[keys]]\ntenant = "x"\nsha256 = "CANARY"', "sha256"),
        ('[[keys]]\ntenant = "x y"\nkey = "CANARY"', "tenant"),
        ('[[keys]]\ntenant = "x"\nkye = "CANARY"', "kye"),
        ('[[keys]]\ntenant = "x"\nkey = "CANARY"\n' * 2, "twice"),
        ("[tenants.x]\nconcurrent = 1", "has no key"),
        ('[[keys]]\ntenant = "x"\nkey = "k"\n[tenants.x]\nconcurrent = -1', "concurrent"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as failure:
        read_keys(TenancyConfig(keys_file=str(file)))
    assert why in str(failure.value)
    assert "CANARY" not in str(failure.value)
    assert "\n" not in str(failure.value)
