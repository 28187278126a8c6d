"""What a gateway really answers, held against the document that it serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rig import CHAT, CUT, Reply, ask, chat, completion, delta, plain, stream

from gateway.stored import STORED

KEY = "sk-one"
BEARER = ("Authorization", f"Bearer {KEY}")
NOT_REACHED = {
    "401": "asked for in test_e02_routes_and_keys",
    "403": "asked for in test_e01_admin_surface",
    "408": "takes 20 s: test_e07_slow_clients",
    "500": "needs a fault of the gateway",
}


@dataclass
class Judge:
    """Holds answers against a document, and remembers which of its answers it has seen."""

    document: dict[str, Any]

    def __post_init__(self) -> None:
        self.seen: set[tuple[str, str, str]] = set()

    def check(self, method: str, path: str, reply: Reply) -> None:
        """The status is listed; content type, body and headers are as it says."""
        status = str(reply.status)
        told = self.document["paths"][path][method.lower()]["responses"]
        assert status in told, f"{method} {path} answers {status}, which is not documented"
        answer = self.find(told[status])
        self.seen.add((method, path, status))
        kind = (reply.header("content-type") or "").split(";")[0]
        content = answer["content"]
        assert kind in content or "*/*" in content, (path, kind)
        schema = content.get(kind, content.get("*/*")).get("schema", {})
        if kind == "application/json":
            whole = {**schema, "components": self.document["components"]}
            errors = [
                error.message for error in Draft202012Validator(whole).iter_errors(reply.json)
            ]
            assert not errors, (method, path, status, errors)
        for name, header in answer.get("headers", {}).items():
            value = reply.header(name)
            assert value is not None, f"{method} {path} {status} lacks {name}"
            kinds = self.find(header)["schema"]
            given = int(value) if kinds["type"] == "integer" else value
            assert Draft202012Validator(kinds).is_valid(given), (name, value)

    def find(self, node: dict[str, Any]) -> dict[str, Any]:
        """What a reference stands for."""
        if "$ref" not in node:
            return node
        found: Any = self.document
        for part in node["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return self.find(found)

    def not_seen(self) -> set[tuple[str, str, str]]:
        """Answers that the document promises and that nobody has got."""
        every = {
            (method.upper(), path, status)
            for path, methods in self.document["paths"].items()
            for method, told in methods.items()
            for status in told["responses"]
        }
        return {one for one in every - self.seen if one[2] not in NOT_REACHED}


async def judge_of(url: str, *headers: tuple[str, str]) -> Judge:
    reply = await ask(url, "/openapi.json", None, *headers)
    judge = Judge(reply.json)
    judge.check("GET", "/openapi.json", reply)
    return judge


PROMPT = {"model": "m", "prompt": "hi"}
RELAYED = ("/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/rerank", "/v1/score")
RELAYED += ("/tokenize", "/detokenize", "/v1/{path}")


def stored_operations() -> list[tuple[str, str]]:
    return [(method, path) for path, methods in STORED.items() for method in methods]


async def about_stored(judge: Judge, worker: Any, url: str) -> None:
    """All that is asked about a stored response, in all ways in which it can fail."""
    for method, path in stored_operations():
        for script, body, header, status in (
            (completion(), None, (), 200),
            (completion(), None, (("x-headwater-priority", "soon"),), 400),
            (plain(b"{}", 404), None, (), 404),
            (completion(), b"x" * 20_000, (), 413),
            ([CUT], None, (), 502),
            ([1.0], None, (("x-headwater-timeout", "0.1"),), 504),
        ):
            worker.plays(script)
            target = path.replace("{id}", "resp_1")
            reply = await ask(url, target, body, *header, method=method)
            assert reply.status == status, (method, path)
            judge.check(method, path, reply)
        judge.check(method, path, await ask(url, target, None, method="PUT"))


async def test_the_public_listener(stub, serve) -> None:
    worker = await stub()
    tight = {"workers.idle_timeout_s": 5.0, "listen.max_body_mib": 0.01, "routing.retries": 0}
    served = await serve(worker, **tight)
    judge = await judge_of(served.url)

    async def post(path: str, body: Any, *headers: tuple[str, str]) -> int:
        reply = await ask(served.url, path.replace("{path}", "a/b"), body, *headers)
        judge.check("POST", path, reply)
        return reply.status

    async def everywhere(path: str, body: dict[str, Any]) -> None:
        worker.plays(completion())
        assert await post(path, body) == 200
        assert await post(path, body, ("x-headwater-priority", "soon")) == 400
        assert await post(path, {**body, "model": "nobody"}) == 404
        assert await post(path, b'{"a":"' + b"x" * 20_000 + b'"}') == 413
        got = await ask(served.url, path.replace("{path}", "a/b"), None, method="PUT")
        judge.check("POST", path, got)
        assert got.status == 405
        worker.plays([CUT])
        assert await post(path, body) == 502
        worker.plays([1.0])
        assert await post(path, body, ("x-headwater-timeout", "0.1")) == 504
        worker.plays(plain(b"<p>no</p>", 418, ("Content-Type", "text/html")))

    for path, body in ((CHAT, chat()), ("/v1/completions", PROMPT)):
        await everywhere(path, body)
        assert await post(path, b"{}", ("Content-Type", "text/plain")) == 415
        worker.plays(stream(delta("a")))
        assert await post(path, {**body, "stream": True}) == 200
    for path in RELAYED:
        await everywhere(path, {"model": "m"})
    await about_stored(judge, worker, served.url)
    for path in ("/health", "/ready", "/v1/models", "/v1/models/{id}"):
        judge.check("GET", path, await ask(served.url, path.replace("{id}", "m")))
        judge.check("GET", path, await ask(served.url, path, method="POST"))
    judge.check("GET", "/v1/models/{id}", await ask(served.url, "/v1/models/nobody"))
    judge.check("GET", "/openapi.json", await ask(served.url, "/openapi.json", method="POST"))
    served.gateway.router.drain(worker.id, 0.0)
    for path in (CHAT, "/v1/completions", *RELAYED):
        body = {**chat(), **PROMPT}
        assert await post(path, body) == 503
    for method, path in stored_operations():
        judge.check(method, path, await ask(served.url, path, None, method=method))
    judge.check("GET", "/ready", await ask(served.url, "/ready"))
    assert {one for one in judge.not_seen() if one[2] != "429"} == set()


async def test_limits(stub, serve, tmp_path) -> None:
    from hashlib import sha256

    keys = tmp_path / "keys.toml"
    digest = sha256(KEY.encode()).hexdigest()
    keys.write_text(
        f'[[keys]]\nsha256 = "{digest}"\ntenant = "t"\n[tenants.t]\nrequests_per_minute = 1\n'
    )
    served = await serve(await stub(), **{"tenancy.keys_file": str(keys)})
    judge = await judge_of(served.url, BEARER)
    assert (await ask(served.url, CHAT, chat(), BEARER)).status == 200
    for path in (CHAT, "/v1/completions", *RELAYED):
        body = {**chat(), **PROMPT}
        reply = await ask(served.url, path.replace("{path}", "a"), body, BEARER)
        judge.check("POST", path, reply)
        assert reply.status == 429
    refused = await ask(served.url, CHAT, chat())
    judge.check("POST", CHAT, refused)
    assert refused.status == 401


async def test_the_admin_listener(stub, serve, tmp_path) -> None:
    worker = await stub()
    served = await serve(worker, **{"ledger.dir": str(tmp_path)})
    judge = await judge_of(served.admin)
    base = served.admin
    reply = await ask(base, "/admin/report")
    judge.check("GET", "/admin/report", reply)
    assert reply.status == 404
    for _ in range(2):
        reply = await ask(served.url, CHAT, chat("x" * 3000))
    name = reply.header("x-request-id")
    for path in judge.document["paths"]:
        for method in ("PUT", "GET"):
            if path == "/dashboard/events" and method == "GET":
                continue
            target = path.replace("{id}", name if "requests" in path else worker.id)
            known = "get" in judge.document["paths"][path]
            if method == "PUT":
                put = await ask(base, target, {}, method="PUT")
                judge.check(
                    "GET" if known else next(iter(judge.document["paths"][path])), path, put
                )
            elif known:
                judge.check("GET", path, await ask(base, target))

    async def post(path: str, body: Any, status: int, method: str = "POST", id: str = "") -> None:
        reply = await ask(base, path.replace("{id}", id or worker.id), body, method=method)
        judge.check(method, path, reply)
        assert reply.status == status, (path, reply.body)

    for path in ("/admin/explain", "/admin/index/who"):
        await post(path, chat("x" * 3000), 200)
        await post(path, b"[]", 400)
    await post("/admin/explain", {**chat(), "model": "nobody"}, 200)
    await post("/admin/index/who", {**chat(), "model": "nobody"}, 404)
    await post("/admin/index/flush", {"worker": worker.id}, 200)
    await post("/admin/index/flush", {"all": True}, 200)
    await post("/admin/index/flush", {}, 400)
    await post("/admin/index/flush", {"worker": "nobody"}, 404)
    for action in ("drain", "undrain"):
        await post(f"/admin/workers/{{id}}/{action}", b"", 200)
        await post(f"/admin/workers/{{id}}/{action}", b"", 404, id="nobody")
    await post("/admin/workers", {"url": worker.url}, 200)
    await post("/admin/workers", {"url": "gopher://x"}, 400)
    await post("/admin/workers/{id}", None, 200, "DELETE")
    await post("/admin/workers/{id}", None, 404, "DELETE")
    judge.check("GET", "/admin/requests/{id}", await ask(base, "/admin/requests/nobody"))
    left = {one for one in judge.not_seen() if one[2] in ("200", "404")}
    assert left == {("GET", "/dashboard/events", "200")}, "it never ends: test_dashboard"


def test_the_judge_notices() -> None:
    document = {
        "paths": {"/a": {"get": {"responses": {"200": {
            "headers": {"x-n": {"schema": {"type": "integer", "minimum": 0}}},
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/A"}}},
        }}}}},
        "components": {"schemas": {"A": {"type": "object", "required": ["b"]}}},
    }  # fmt: skip
    judge = Judge(document)
    kind = ("content-type", "application/json")

    def reply(status: int, body: object, *headers: tuple[str, str]) -> Reply:
        return Reply(status, [kind, *headers], json.dumps(body).encode(), True)

    judge.check("GET", "/a", reply(200, {"b": 1}, ("x-n", "1")))
    for wrong in (
        reply(201, {"b": 1}, ("x-n", "1")),
        reply(200, {}, ("x-n", "1")),
        reply(200, {"b": 1}),
        reply(200, {"b": 1}, ("x-n", "-1")),
    ):
        with pytest.raises(AssertionError):
            judge.check("GET", "/a", wrong)
