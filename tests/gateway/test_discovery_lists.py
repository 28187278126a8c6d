"""Lists of workers: DNS answers, a watched file, EndpointSlices of a Kubernetes API server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from kubestub import KubeStub, endpoint, slice_of
from redisrig import certificates
from rig import eventually

from gateway.config import DnsConfig, FileConfig, KubernetesConfig
from gateway.discovery.allowed import refusal
from gateway.discovery.base import Listing, ListSource
from gateway.discovery.dns import DnsList, dns_names
from gateway.discovery.file import FileList, parse
from gateway.discovery.kubernetes import KubernetesList, api_url, namespace_of
from gateway.discovery.slices import NOT_READY, TERMINATING, Slice, SliceStore
from shared.errors import ConfigError


class Heard:
    """What a list told."""

    def __init__(self) -> None:
        self.listings: list[dict[str, str]] = []
        self.faults: list[str] = []

    def tell(self, listing: Listing) -> None:
        self.listings.append(dict(listing.workers))

    def fault(self, reason: str) -> None:
        self.faults.append(reason)

    async def until(self, workers: dict[str, str]) -> None:
        await eventually(lambda: self.listings[-1:] == [workers], 20.0)

    async def until_fault(self, word: str) -> None:
        """A fault with this word; "": none any more."""

        def heard() -> bool:
            last = self.faults[-1] if self.faults else None
            return last is not None and (word in last if word else not last)

        await eventually(heard, 20.0)


@asynccontextmanager
async def following(one: ListSource) -> AsyncIterator[Heard]:
    heard = Heard()
    task = asyncio.create_task(one.run(heard.tell, heard.fault))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.wait({task})


# --- DNS -----------------------------------------------------------------------------------------


class Names:
    """A resolver that answers as it is told to."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        self.hang = False
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if self.hang:
            await asyncio.sleep(60.0)
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return answer


def dns(names: Names, now: list[float], *urls: str) -> DnsList:
    config = DnsConfig(urls=urls or ("http://vllm:8000",), interval_s=0.01, forget_s=15.0)
    return DnsList(config, lambda: now[0], names)


async def test_every_address_of_a_name_is_a_worker() -> None:
    names, now = Names(), [0.0]
    names.answers = {"vllm": ["10.0.0.1", "fd00::1"], "sgl": ["10.0.1.1"]}
    one = dns(names, now, "http://vllm:8000", "http://sgl:30000/base")
    assert await one.look() == []
    assert set(one.listing().workers) == {
        "http://10.0.0.1:8000",
        "http://[fd00::1]:8000",
        "http://10.0.1.1:30000/base",
    }


async def test_a_failed_answer_keeps_the_last_good_one_and_says_so() -> None:
    names, now = Names(), [0.0]
    names.answers = {"vllm": ["10.0.0.1"], "sgl": ["10.0.1.1"]}
    one = dns(names, now, "http://vllm:8000", "http://sgl:8000")
    await one.look()
    before = dict(one.listing().workers)
    failures = (OSError(-2, "Name or service not known"), [], UnicodeError("label too long"))
    for failure in failures:
        names.answers["vllm"] = failure  # type: ignore[assignment]
        now[0] += 3600.0
        reasons = await one.look()
        assert len(reasons) == 1
        assert reasons[0].startswith("vllm: ")
        assert dict(one.listing().workers) == before


async def test_an_address_left_out_is_let_go_after_a_while_only() -> None:
    """Resolvers answer in part; a name with many addresses must not flap."""
    names, now = Names(), [0.0]
    names.answers = {"vllm": ["10.0.0.1", "10.0.0.2"]}
    one = dns(names, now)
    await one.look()
    names.answers = {"vllm": ["10.0.0.2"]}
    now[0] = 14.0
    await one.look()
    assert "http://10.0.0.1:8000" in one.listing().workers
    now[0] = 15.0
    await one.look()
    assert set(one.listing().workers) == {"http://10.0.0.2:8000"}


async def test_nothing_is_told_before_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list would say that everybody else's workers here are gone."""
    names, now = Names(), [0.0]
    names.answers = {"vllm": OSError(-3, "Temporary failure in name resolution")}
    async with following(dns(names, now)) as heard:
        await heard.until_fault("Temporary failure")
        assert heard.listings == []
        names.answers = {"vllm": ["10.0.0.1"]}
        await heard.until({"http://10.0.0.1:8000": ""})
        await heard.until_fault("")


async def test_a_resolver_that_hangs_is_asked_no_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.discovery.dns.ANSWER_S", 0.01)
    names, now = Names(), [0.0]
    names.hang = True
    one = dns(names, now)
    assert [await one.look() for _ in range(3)] == [["vllm: no answer from the resolver"]] * 3
    assert names.asked == 1
    for task in one._hanging.values():
        task.cancel()


async def test_the_systems_resolver_is_used() -> None:
    one = DnsList(DnsConfig(urls=("http://localhost:8000",)), lambda: 0.0)
    assert await one.look() == []
    assert "http://127.0.0.1:8000" in one.listing().workers


@pytest.mark.parametrize("url", ["vllm:8000", "https://vllm:8000", "http://u:p@vllm:1", "http://"])
def test_a_wrong_name_is_one_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"discovery\.dns\.urls"):
        dns_names(DnsConfig(urls=(url,)))


# --- the file ------------------------------------------------------------------------------------


def test_both_forms_of_the_file() -> None:
    toml = b'[[workers]]\nurl = "http://a:1/"\n[[workers]]\nurl = "http://b:2"\ndrain = true\n'
    assert parse(toml, ".toml").workers == {
        "http://a:1": "",
        "http://b:2": "asked for in the workers' file",
    }
    data = json.dumps({"workers": ["http://a:1", {"url": "http://b:2", "drain": False}]}).encode()
    assert parse(data, ".json").workers == {"http://a:1": "", "http://b:2": ""}
    assert parse(b"workers = []", ".toml").workers == {}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"workers = [", "TOML|read"),
        (b"worker = []", "worker"),
        (b'workers = ["nowhere"]', "http://host:port"),
        (b'workers = ["http://a:1", "http://a:1/"]', "twice"),
        (b"workers = [1]", "int"),
        (b'[[workers]]\nurl = "http://a:1"\ndrian = true', "drian"),
        (b"\xff\xfe", "read"),
        (b"", "workers"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_reason(data: bytes, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        parse(data, ".toml")
    assert "\n" not in str(error.value)


async def test_the_file_is_followed_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    config = FileConfig(path=str(path), interval_s=0.01)
    async with following(FileList(config)) as heard:
        await heard.until_fault("No such file")
        path.write_text('workers = ["http://a:1"]')
        await heard.until({"http://a:1": ""})
        await heard.until_fault("")
        told = len(heard.listings)
        path.write_text('workers = ["http://a:1", ')
        await heard.until_fault("cannot be read")
        path.unlink()
        await heard.until_fault("No such file")
        assert len(heard.listings) == told
        # as a mounted ConfigMap changes: a link to another file
        other = tmp_path / "other.toml"
        other.write_text('workers = ["http://b:1"]')
        path.symlink_to(other)
        await heard.until({"http://b:1": ""})


async def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text('{"workers": []}')
    one, heard = FileList(FileConfig(path=str(path))), Heard()
    for _ in range(3):
        await one.look(heard.tell, heard.fault)
    assert heard.listings == [{}]
    os.utime(path, ns=(1, 1))
    await one.look(heard.tell, heard.fault)
    assert len(heard.listings) == 2


def test_a_file_of_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\.toml or \.json"):
        FileList(FileConfig(path="workers.yaml"))


# --- EndpointSlices ------------------------------------------------------------------------------


def workers_of(*slices: dict[str, Any], **config: Any) -> dict[str, str]:
    store = SliceStore(KubernetesConfig(services=("vllm",), **config))
    store.replace(msgspec.convert(list(slices), list[Slice]))
    return dict(store.listing().workers)


def test_terminating_endpoints_drain_and_unready_ones_too_while_others_are_ready() -> None:
    found = workers_of(
        slice_of(
            "a",
            endpoint("10.0.0.1", pod="p1"),
            endpoint("10.0.0.2", pod="p2", ready=False, serving=True, terminating=True),
            endpoint("10.0.0.3", pod="p3", ready=False, serving=False),
            endpoint("10.0.0.4", pod="p4", ready=None, serving=None, terminating=None),
        )
    )
    assert found == {
        "http://10.0.0.1:8000": "",
        "http://10.0.0.2:8000": TERMINATING,
        "http://10.0.0.3:8000": NOT_READY,
        "http://10.0.0.4:8000": "",
    }


def test_when_no_endpoint_is_ready_the_probes_decide() -> None:
    """The control plane may have lost its nodes while they all serve."""
    found = workers_of(slice_of("a", *(endpoint(f"10.0.0.{i}", ready=False) for i in (1, 2))))
    assert found == {"http://10.0.0.1:8000": "", "http://10.0.0.2:8000": ""}


def test_a_pod_in_two_slices_is_one_worker() -> None:
    moving = (
        slice_of("old", endpoint("10.0.0.1", pod="p1", ready=False)),
        slice_of("new", endpoint("10.0.0.1", pod="p1")),
    )
    assert workers_of(*moving) == workers_of(*reversed(moving)) == {"http://10.0.0.1:8000": ""}
    both = (
        slice_of("v6", endpoint("fd00::1", pod="p1"), family="IPv6"),
        slice_of("v4", endpoint("10.0.0.1", pod="p1")),
    )
    assert workers_of(*both) == workers_of(*reversed(both)) == {"http://10.0.0.1:8000": ""}
    assert workers_of(both[0]) == {"http://[fd00::1]:8000": ""}


def test_a_pod_behind_two_services_takes_requests_if_one_says_so() -> None:
    found = workers_of(
        slice_of("a", endpoint("10.0.0.1", pod="p1", ready=False), endpoint("10.0.0.2", pod="p2")),
        slice_of("b", endpoint("10.0.0.1", pod="p1"), service="other"),
    )
    assert found == {"http://10.0.0.1:8000": "", "http://10.0.0.2:8000": ""}


@pytest.mark.parametrize(
    ("port", "ports", "expected"),
    [
        ("", [{"name": "", "port": 9000}], "9000"),
        ("http", [{"name": "metrics", "port": 1}, {"name": "http", "port": 2}], "2"),
        ("2", [{"name": "metrics", "port": 1}, {"name": "http", "port": 2}], "2"),
        ("8000", [], "8000"),
        ("", [{"name": "metrics", "port": 1}, {"name": "http", "port": 2}], None),
        ("web", [{"name": "http", "port": 2}], None),
        ("", [], None),
    ],
)
def test_which_port(port: str, ports: list[dict[str, Any]], expected: str | None) -> None:
    one = slice_of("a", endpoint("10.0.0.1"), ports=ports)
    store = SliceStore(KubernetesConfig(services=("vllm",), port=port))
    store.put(msgspec.convert(one, Slice))
    if expected is None:
        assert store.listing().workers == {}
        assert "set discovery.kubernetes.port" in store.problems()[0]
    else:
        assert set(store.listing().workers) == {f"http://10.0.0.1:{expected}"}
        assert store.problems() == []


@pytest.fixture
async def api() -> AsyncIterator[KubeStub]:
    stub = KubeStub()
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.discovery.kubernetes.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("gateway.discovery.kubernetes.LONGEST_PAUSE_S", 0.05)


def kube(api: KubeStub, tmp_path: Path, *services: str) -> KubernetesList:
    token = tmp_path / "token"
    token.write_text("t1\n")
    config = KubernetesConfig(
        services=services or ("vllm",),
        namespace="llm",
        api=api.url,
        token_file=str(token),
        ca_file=str(tmp_path / "none"),
    )
    return KubernetesList(config, {}, Random(1))


ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


async def test_slices_are_listed_page_by_page_and_watched(api: KubeStub, tmp_path: Path) -> None:
    api.page = 1
    api.put(slice_of("a", endpoint("10.0.0.1")))
    api.put(slice_of("b", endpoint("10.0.0.2"), service="sgl"))
    async with following(kube(api, tmp_path, "vllm", "sgl")) as heard:
        await heard.until({ONE: "", TWO: ""})
        selector = {asked["labelSelector"] for asked in api.requests}
        assert selector == {"kubernetes.io/service-name in (vllm,sgl)"}
        api.put(slice_of("a", endpoint("10.0.0.1", ready=False, terminating=True)))
        await heard.until({ONE: TERMINATING, TWO: ""})
        api.delete("a")
        await heard.until({TWO: ""})
        assert api.lists == 2


async def test_a_watch_that_ends_is_taken_up_where_it_stopped(
    api: KubeStub, tmp_path: Path
) -> None:
    api.put(slice_of("a", endpoint("10.0.0.1")))
    async with following(kube(api, tmp_path)) as heard:
        await heard.until({ONE: ""})
        api.bookmark()
        api.put(slice_of("b", endpoint("10.0.0.2")))
        await heard.until({ONE: "", TWO: ""})
        seen = api.version
        api.cut()
        api.delete("b")
        await heard.until({ONE: ""})
        assert api.lists == 1
        versions = [int(asked["resourceVersion"]) for asked in api.requests if "watch" in asked]
        assert versions[-1] >= seen
        assert all(asked["allowWatchBookmarks"] == "true" for asked in api.requests[1:])


async def test_a_version_that_is_gone_means_a_new_list(api: KubeStub, tmp_path: Path) -> None:
    api.put(slice_of("a", endpoint("10.0.0.1")))
    async with following(kube(api, tmp_path)) as heard:
        await heard.until({ONE: ""})
        api.slices.pop("a")  # a change whose event nobody will ever see
        api.slices["b"] = slice_of("b", endpoint("10.0.0.2"))
        api.forget()
        await heard.until({TWO: ""})
        assert {} not in heard.listings


@pytest.mark.parametrize(("status", "word"), [(403, "endpointslices"), (500, "500"), (401, "list")])
async def test_an_api_server_that_refuses_removes_nobody(
    api: KubeStub, tmp_path: Path, status: int, word: str
) -> None:
    api.put(slice_of("a", endpoint("10.0.0.1")))
    async with following(kube(api, tmp_path)) as heard:
        await heard.until({ONE: ""})
        api.status = status
        api.cut()
        await heard.until_fault(word)
        assert heard.listings[-1] == {ONE: ""}
        api.status = 200
        api.put(slice_of("b", endpoint("10.0.0.2")))
        await heard.until({ONE: "", TWO: ""})
        await heard.until_fault("")


async def test_a_token_is_read_again(api: KubeStub, tmp_path: Path) -> None:
    one = kube(api, tmp_path)
    async with following(one) as heard:
        await heard.until({})
        (tmp_path / "token").write_text("t2")
        api.put(slice_of("a", endpoint("10.0.0.1")))
        api.cut()
        await heard.until({ONE: ""})
        api.cut()
        await eventually(lambda: api.tokens[-1] == "Bearer t2", 20.0)
    assert api.tokens[0] == "Bearer t1"


async def test_an_api_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = KubernetesConfig(services=("v",), namespace="n", api="http://127.0.0.1:9")
    async with following(KubernetesList(config, {}, Random(1))) as heard:
        await heard.until_fault("cannot be reached")
        assert heard.listings == []


async def test_the_api_servers_certificate_is_checked(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    api = KubeStub()
    await api.start(made.front(ask_client=False))
    api.put(slice_of("a", endpoint("10.0.0.1")))
    try:
        for ca, works in ((made.authority, True), (tmp_path / "none", False)):
            config = KubernetesConfig(
                services=("vllm",),
                namespace="llm",
                api=api.url,
                token_file=str(tmp_path / "no-token"),
                ca_file=str(ca),
            )
            async with following(KubernetesList(config, {}, Random(1))) as heard:
                if works:
                    await heard.until({ONE: ""})
                else:
                    await heard.until_fault("TLS")
                    assert heard.listings == []
    finally:
        await api.stop()


def test_where_the_api_server_is() -> None:
    config = KubernetesConfig(services=("v",))
    env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert api_url(config, env) == "https://10.96.0.1:443"
    assert api_url(config, {"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.api"):
        api_url(config, {})
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.namespace"):
        namespace_of(config)


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://[fe80::1]:80",
        "http://0.0.0.0:8000",
        "http://[::ffff:169.254.169.254]",
        "http://2852039166:80",
        "http://[fe80::1%25eth0]:80",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://224.0.0.1:1",
    ],
)
async def test_no_worker_is_at_such_an_address(url: str) -> None:
    assert "refused" in await refusal(url)


async def test_usual_addresses_are_fine() -> None:
    for url in ("http://127.0.0.1:1", "http://10.0.0.1:8000", "http://[fd00::1]:1"):
        assert await refusal(url) == ""
