"""``headwater doctor``: every check can fail, and each failure names its fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis
from rig import Stub
from tokenstub import OTHER_TEMPLATE, TokenStub, with_template

from gateway.config import GatewayConfig
from gateway.decision import WorkerStatus
from gateway.discovery.base import Source
from gateway.doctor import text
from gateway.doctor.adminview import GatewayView
from gateway.doctor.checks import CHECKS, Finding, Status, failed, finding
from gateway.doctor.examine import examine
from gateway.doctor.redisdoctor import examine_redis, version
from gateway.doctor.reuse import Reuse, probe_text
from gateway.doctor.workerdoctor import fleet_findings, list_findings, worker_findings
from gateway.feeds.sources import SourceState
from gateway.parity import Verdict
from gateway.routing.base import Trust, WorkerState
from shared.bundle import TokenizerBundle
from shared.bytetok import byte_bundle
from shared.cli import run
from shared.settings import load

GOOD = WorkerStatus(
    id="w",
    url="http://w:1",
    models=("m",),
    engine="vllm",
    state=WorkerState.READY,
    reason="",
    trust=Trust.EXACT,
    trust_reason="events from the worker",
    block_size=16,
    epoch=1,
    inflight=0,
    booked_prefill_s=0.0,
    booked_tokens=0,
    index_blocks=0,
    index_host_blocks=0,
    prefill_s_per_token=1e-4,
    failure_rate=0.0,
    running=0,
    waiting=0,
    load_age_s=0.1,
    tokenizer="t",
    event_feed=True,
    parity=Verdict.EQUAL,
)
REUSED = Reuse("", 100, 96, 0.0)


def of(findings: list[Finding], check: str) -> Finding:
    [one] = [one for one in findings if one.check == check]
    return one


def settings(**flags: Any) -> GatewayConfig:
    quick = {"workers.health_interval_s": 0.1, "workers.health_timeout_s": 5.0}
    return load(GatewayConfig, file=None, env={}, flags={**quick, **flags})


def doctor(*arguments: str) -> int:
    point = EntryPoint("doctor", "gateway.cli.doctor:app", "headwater.commands")
    return run([point], ["doctor", *arguments])


# --- what is seen becomes findings ---------------------------------------------------------------


def test_a_good_worker_is_ok_throughout() -> None:
    found = worker_findings(GOOD, REUSED)
    assert {one.status for one in found} == {Status.OK}
    assert {one.check for one in found} == {c.id for c in CHECKS if c.id.startswith("worker.")}


@pytest.mark.parametrize(
    ("change", "reuse", "check", "status", "fix"),
    [
        ({"state": WorkerState.DOWN, "reason": "loading"}, REUSED, "worker.ready", "failed", ""),
        ({"state": WorkerState.DRAINING}, REUSED, "worker.ready", "warning", ""),
        ({"models": ()}, REUSED, "worker.models", "failed", "load"),
        (
            {"parity": Verdict.DIFFERENT, "parity_reason": "a second BOS", "parity_fix": "no BOS"},
            REUSED,
            "worker.tokens",
            "failed",
            "no BOS",
        ),
        ({"parity": Verdict.UNPROVEN}, REUSED, "worker.tokens", "warning", "routes"),
        (
            {"parity": Verdict.UNPROVEN, "parity_fix": "[render] tokenizers"},
            REUSED,
            "worker.tokens",
            "warning",
            "[render] tokenizers",
        ),
        ({"block_size": 1, "engine": "sglang"}, REUSED, "worker.blocks", "warning", "--page-size"),
        ({"block_size": 784}, REUSED, "worker.blocks", "warning", "--block-size"),
        ({"trust": Trust.LEARNED}, REUSED, "worker.events", "failed", "--kv-events-config"),
        (
            {"trust": Trust.LEARNED, "event_feed": False, "engine": "sglang"},
            REUSED,
            "worker.events",
            "warning",
            "--kv-events-config",
        ),
        (
            {"load_age_s": None, "engine": "sglang"},
            REUSED,
            "worker.load",
            "warning",
            "--enable-metrics",
        ),
        ({}, Reuse("", 100, None), "worker.reports", "failed", "--enable-prompt-tokens-details"),
        (
            {"engine": "sglang"},
            Reuse("", 100, None),
            "worker.reports",
            "failed",
            "--enable-cache-report",
        ),
        ({}, Reuse("", 100, 0), "worker.reports", "failed", "--enable-prefix-caching"),
        (
            {"engine": "headwater"},
            Reuse("", 100, 0),
            "worker.reports",
            "failed",
            "--no-prefix-cache",
        ),
        ({"engine": "openai"}, Reuse("", 100, None), "worker.reports", "warning", "usage"),
        ({}, Reuse("500 ill"), "worker.reports", "failed", "log"),
        ({}, Reuse("", 100, 96, 600.0), "worker.clock", "warning", "chrony"),
    ],
)
def test_each_fault_is_found_with_its_fix(
    change: dict[str, Any], reuse: Reuse, check: str, status: str, fix: str
) -> None:
    one = of(worker_findings(replace(GOOD, **change), reuse), check)
    assert one.status == status
    assert fix in one.fix
    assert one.fix


def test_an_engine_without_events_is_no_fault() -> None:
    plain = replace(GOOD, engine="llamacpp", trust=Trust.LEARNED, event_feed=False)
    assert of(worker_findings(plain, REUSED), "worker.events").status is Status.OK


def test_no_worker_and_only_dead_ones_are_failures() -> None:
    assert failed(fleet_findings([]))
    assert failed(fleet_findings([replace(GOOD, state=WorkerState.DOWN)]))
    assert not failed(fleet_findings([GOOD]))


def test_two_tokenizers_under_one_model_name_are_a_failure() -> None:
    found = fleet_findings([GOOD, replace(GOOD, id="v", tokenizer="u")])
    assert of(found, "fleet.models").status is Status.FAILED
    assert of(fleet_findings([GOOD, replace(GOOD, id="v")]), "fleet.models").status is Status.OK


def test_lists_are_told_with_their_faults() -> None:
    found = list_findings(
        [
            SourceState(Source.DNS, None, "vllm: Name or service not known"),
            SourceState(Source.FILE, 0, ""),
            SourceState(Source.KUBERNETES, 3, ""),
        ]
    )
    assert [one.status for one in found] == [Status.FAILED, Status.WARNING, Status.OK]


def test_the_probe_prompt_is_longer_than_a_few_blocks_and_never_the_same() -> None:
    for size in (1, 16, 784):
        assert len(probe_text(size, "n").split()) >= 2 * size + 32
    assert probe_text(16, "a") != probe_text(16, "b")


def test_every_failure_has_a_fix_and_every_check_a_meaning() -> None:
    for check in CHECKS:
        assert check.asks.endswith("?") or "?" in check.asks
        assert finding(check.id, "s", Status.FAILED, "d").fix
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    with pytest.raises(KeyError):
        finding("no.such", "s", Status.OK, "d")


def test_all_forms_of_the_report() -> None:
    found = [
        finding("redis.version", "redis r", Status.OK, "Redis 7"),
        finding("worker.ready", "worker w", Status.FAILED, "lo\x1b[31mading"),
    ]
    lines = text.to_lines(found)
    assert "failed   worker w  worker.ready: lo [31mading" in lines
    assert "fix: see the reason" in lines
    assert lines.endswith("failed: 1 ok, 1 failed\n")
    whole = json.loads(text.to_json(found))
    assert (whole["ok"], whole["counts"]["failed"]) == (False, 1)
    table = text.to_table(found, 80, colour=False)
    assert "worker.ready" in table
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in table


# --- Redis ---------------------------------------------------------------------------------------


async def test_a_good_redis(redis_server: Any) -> None:
    found = await examine_redis(settings(**{"redis.url": redis_server.url}))
    assert not [one for one in found if one.status is Status.FAILED], found
    assert {one.check for one in found} == {c.id for c in CHECKS if c.id.startswith("redis.")}
    again = await examine_redis(settings(**{"redis.url": redis_server.url}))
    assert of(again, "redis.keyspace").detail.startswith("deployment 'headwater': 0 workers")


async def test_a_redis_that_evicts_is_a_warning(redis_server_factory: Any) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    server = redis_server_factory("newest", *options)
    found = await examine_redis(settings(**{"redis.url": server.url}))
    one = of(found, "redis.memory")
    assert one.status is Status.WARNING
    assert "volatile-ttl" in one.fix


async def test_a_user_without_rights_is_told_which_are_missing(redis_server_factory: Any) -> None:
    server = redis_server_factory("newest")
    admin = Redis.from_url(server.url)
    await admin.execute_command(
        *"ACL SETUSER few on >pw ~hw:* +role +time +cluster|slots +client +smembers".split()
    )
    await admin.aclose()
    url = server.url.replace("redis://", "redis://few:pw@")
    found = await examine_redis(settings(**{"redis.url": url}))
    one = of(found, "redis.rights")
    assert one.status is Status.FAILED
    assert "XADD" in one.detail
    assert "docs/redis.md" in one.fix
    assert of(found, "redis.version").status is Status.SKIPPED
    assert not any("pw" in one.subject + one.detail for one in found)


async def test_a_dead_redis_and_a_wrong_password(redis_server_factory: Any) -> None:
    dead = await examine_redis(settings(**{"redis.url": "redis://127.0.0.1:9/0"}))
    assert of(dead, "redis.reachable").status is Status.FAILED
    server = redis_server_factory("newest")
    admin = Redis.from_url(server.url)
    await admin.config_set("requirepass", "pw")
    await admin.aclose()
    url = server.url.replace("redis://", "redis://:wrong@")
    found = await examine_redis(settings(**{"redis.url": url}))
    one = of(found, "redis.reachable")
    assert one.status is Status.FAILED
    assert "password" in one.fix
    assert "wrong" not in one.detail + one.subject


def test_versions() -> None:
    assert version({"redis_version": "6.0.16"}, "r").status is Status.FAILED
    assert version({"redis_version": "6.2.0"}, "r").status is Status.OK
    assert version({"redis_version": "7.2.4", "valkey_version": "9.1"}, "r").detail == "Valkey 9.1"
    assert version({}, "r").status is Status.SKIPPED


# --- whole runs ----------------------------------------------------------------------------------


def render_files(bundle: TokenizerBundle, folder: Path) -> str:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(bundle.tokenizer_json)
    (folder / "chat_template.jinja").write_text(bundle.chat_template or "")
    return str(folder)


async def test_a_whole_healthy_deployment(
    worker_process: Any, redis_server_factory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = redis_server_factory("newest")
    worker = worker_process("--redis", server.url)
    found = await examine(settings(**{"redis.url": server.url}), 20.0)
    assert not failed(found), [one for one in found if one.status is not Status.OK]
    checks = {one.check for one in found if one.status is Status.OK}
    wanted = ("worker.tokens", "worker.events", "worker.reports", "redis.keyspace")
    assert checks >= set(wanted)
    assert worker.url.removeprefix("http://") in of(found, "redis.keyspace").detail


async def test_what_is_wrong_with_engines_is_named(tmp_path: Path) -> None:
    silent = await TokenStub.start(cached=None, date="Thu, 01 Jan 2026 00:00:00 GMT")
    other = await TokenStub.start(bundle=with_template(byte_bundle(), OTHER_TEMPLATE), cached=64)
    dead = "http://127.0.0.1:9"
    files = render_files(byte_bundle(), tmp_path / "model")
    try:
        found = await examine(
            settings(
                **{
                    "workers.urls": f"{silent.url},{other.url},{dead}",
                    "render.tokenizers": json.dumps({"m": files}),
                }
            ),
            20.0,
        )
    finally:
        await silent.stop()
        await other.stop()

    def at(url: str, check: str) -> Finding:
        name = f"worker {url.removeprefix('http://')}"
        return of([one for one in found if one.subject == name], check)

    assert failed(found)
    assert at(dead, "worker.reachable").status is Status.FAILED
    assert "cached_tokens" in at(silent.url, "worker.reports").detail
    assert at(silent.url, "worker.clock").status is Status.WARNING
    assert at(silent.url, "worker.tokens").status is Status.OK
    assert "another template" in at(other.url, "worker.tokens").detail
    assert "--chat-template" in at(other.url, "worker.tokens").fix
    assert at(other.url, "worker.reports").status is Status.OK
    assert at(other.url, "worker.clock").status is Status.OK


async def _admin(workers: Callable[[], list[dict[str, Any]]]) -> tuple[str, web.AppRunner]:
    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer t":
            return web.json_response({}, status=401)
        return web.json_response({"workers": workers()})

    app = web.Application()
    app.router.add_get("/admin/workers", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


async def test_a_running_gateways_view_is_compared() -> None:
    there: list[dict[str, Any]] = []
    url, runner = await _admin(lambda: there)
    try:
        view = GatewayView(url, "t")
        there[:] = [{"id": "w", "url": "http://w:1", "state": "down", "reason": "no route"}]
        assert not failed(await view.look())
        assert view.with_workers(settings()).workers.urls == ("http://w:1",)
        assert "no route" in of(view.compare([GOOD]), "gateway.view").detail
        assert failed(view.compare([GOOD]))
        there[:] = [{"id": "w", "url": "http://w:1", "state": "ready", "trust": "learned"}]
        await view.look()
        assert of(view.compare([GOOD]), "gateway.view").status is Status.WARNING
        there[0]["trust"] = "exact"
        await view.look()
        assert of(view.compare([GOOD]), "gateway.view").status is Status.OK
        assert of(view.compare([replace(GOOD, id="v")]), "gateway.view").status is Status.WARNING
        wrong = GatewayView(url, "other")
        assert "401" in of(await wrong.look(), "gateway.reachable").detail
    finally:
        await runner.cleanup()
    gone = GatewayView(url, "t")
    assert failed(await gone.look())
    assert gone.compare([GOOD]) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "ledger"
    path = tmp_path / "gateway.toml"
    path.write_text(f'[ledger]\ndir = "{ledger}"\ntrace = true\n')
    given = ("-c", str(path), "--workers", "http://127.0.0.1:9", "--wait", "3")
    assert doctor(*given, "--format", "json") == 1
    assert not ledger.exists()  # a gateway may be writing there
    whole = json.loads(capsys.readouterr().out)
    assert whole["ok"] is False
    assert {one["check"] for one in whole["findings"]} >= {"config.valid", "worker.reachable"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--workers", "nowhere"), "workers.urls"),
        (("--format", "xml"), "--format"),
        (("--url", "nowhere"), "--url"),
        (("--redis", "http://x"), "redis.url"),
        (("-c", "/no/such/file.toml"), "file"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*arguments) == 2
    err = capsys.readouterr().err.strip()
    assert word in err
    assert "\n" not in err


async def test_a_stub_that_is_ill_is_not_asked_to_generate() -> None:
    stub = await Stub.start()
    stub.healthy = False
    try:
        found = await examine(settings(**{"workers.urls": stub.url}), 5.0)
    finally:
        await stub.stop()
    assert failed(found)
    assert stub.seen == []
