"""The HTML report: whole by itself, safe, and with a table behind each chart."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ledgerkit import START, headwater, hit, record, write_ledger

from gateway.records import RequestRecord, Shadow, TokenFlow, Why
from gateway.report import summarise, to_html

EVIL = "<script>alert(1)</script>\"'&"


def day() -> list[RequestRecord]:
    """Two hours with hits, misses, losses of every kind, branching families and two workers."""
    records = []
    losses = ("evicted", "diverted_for_load", "draining", "policy", "isolation")
    for number in range(240):
        lost = losses[number % 5]
        given = {"evicted": 160} if lost == "evicted" else {"available": 480, lost: 160}
        flow = TokenFlow(
            **{
                "prompt": 1000, "tail": 8, "cold": 512, "available": 320, "captured": 320,
                "stale_index": 32, "token_mismatch": 16, "unreported": 0, "gained": 16,
                "delivered": 288, **given,
            }
        )  # fmt: skip
        records.append(
            record(
                at=START + 30 * number,
                request_id=f"r{number}",
                worker=f"w{number % 2}",
                trust=("exact", "learned", "blind")[number % 3],
                family=f"{number % 3:08x}",
                path=(1, number % 2, number % 8, number),
                flow=flow if number % 4 else hit(900, 0, 4),
                ttft_s=0.1 if number % 4 else 0.4,
                itl_s=0.01,
                predicted_ttft_s=0.12,
                tenant=EVIL,
                why=Why(code="holder", term="own", other="w9", other_matched=3, gap=0.2),
                round_robin=Shadow(matched_tokens=100, ttft_s=0.3),
            )
        )
    return records


class Reader(HTMLParser):
    """Checks nesting, collects what matters."""

    VOID = ("meta", "link", "polyline", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = write_ledger(tmp_path_factory.mktemp("ledger") / "l.jsonl", day())
    return to_html(summarise([file], by=["tenant", "worker"]))


def test_it_is_well_formed_and_names_every_part(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    labelled = [attrs["aria-labelledby"] for attrs in reader.of("section")]
    assert labelled == ["funnel", "time", "latency", "saved", "workers", "families", "prediction",
                        "groups", "requests"]  # fmt: skip
    assert set(labelled) <= set(ids)


def test_it_needs_no_network_and_no_script(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert not reader.of("script")
    assert not [attrs for _, attrs in reader.tags if "src" in attrs or "onload" in attrs]
    assert [attrs["href"] for attrs in reader.of("link")] == ["data:,"]
    assert not re.search(r"https?://|url\(|@import", page)
    policy = [a["content"] for a in reader.of("meta") if "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_names_from_clients_are_text_and_nothing_else(page: str) -> None:
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_charts_say_in_words_what_they_show_and_have_tables(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    images = [attrs for _, attrs in reader.tags if attrs.get("role") == "img"]
    assert len(images) > 20
    assert all(attrs["aria-label"] for attrs in images)
    for summary in ("tokens by name", "the steps", "percentiles", "requests by trust", "families",
                    "ratios"):  # fmt: skip
        assert f"Table: {summary}" in page
    assert page.count("<table>") >= 8


def test_bars_add_up(page: str) -> None:
    """No column is higher than the plot, no bar wider than its box."""
    for column in re.findall(r'<div class="col".*?</div>', page):
        heights = [float(h) for h in re.findall(r"height:([\d.]+)%", column)]
        assert 0 < sum(heights) <= 100.1
    for bar in re.findall(r'<div class="bar" .*?</div>', page):
        assert sum(float(w) for w in re.findall(r"width:([\d.]+)%", bar)) <= 100.1


def test_a_ledger_with_next_to_nothing_gives_a_page_too(tmp_path: Path) -> None:
    rejected = record(attempt=0, worker="", policy="", trust="", outcome="rejected", status=503)
    for records in ([rejected], [record()], [record(flow=hit(100, 0))]):
        text = to_html(summarise([write_ledger(tmp_path / "l.jsonl", records)]))
        reader = Reader()
        reader.feed(text)
        assert reader.open == []
        assert "None" not in text


def test_the_command_writes_every_form(tmp_path: Path) -> None:
    file = write_ledger(tmp_path / "l.jsonl", day())
    for form, begins in (("html", "<!doctype html>"), ("csv", "worker,requests,prompt,tail")):
        out = tmp_path / f"report.{form}"
        assert headwater("report", file, "--by", "worker", "--format", form, "-o", out) == 0
        assert out.read_text().startswith(begins)
    assert headwater("report", file, "--format", "parquet") == 2
    assert headwater("report", file, "--format", "parquet", "-o", tmp_path / "p.parquet") == 0
    assert headwater("report", tmp_path / "p.parquet", "-o", tmp_path / "text") == 0


def test_csv_has_exact_numbers_and_no_formulas(tmp_path: Path) -> None:
    import csv

    from gateway.report import to_csv

    records = [record(model="=1+1", flow=hit(100, 64)), record(model="m", flow=hit(10**15, 0))]
    report = summarise([write_ledger(tmp_path / "l.jsonl", records)], by=["model"])
    rows = list(csv.DictReader(to_csv(report).splitlines()))
    assert [row["model"] for row in rows] == ["m", "'=1+1"]
    assert rows[0]["prompt"] == str(10**15)
    assert rows[1]["delivered"] == "64"
    whole = list(csv.DictReader(to_csv(summarise([tmp_path / "l.jsonl"])).splitlines()))
    assert [int(row["requests"]) for row in whole] == [2]


def test_names_are_shortened_where_they_do_not_differ() -> None:
    from gateway.report.tables import told_apart

    short = ["w1", "w2"]
    assert told_apart(short, 8) == short
    hosts = [f"gpu-worker-in-rack-{rack}.example.internal:8100" for rack in (1, 2, 17)]
    shown = told_apart(hosts, 26)
    assert len(set(shown)) == 3
    assert all(len(name) <= 28 for name in shown)
    assert all(f"-{rack}." in name for name, rack in zip(shown, (1, 2, 17), strict=True))
    alone = told_apart(["x" * 50], 26)
    assert len(alone[0]) == 26
    for names in (["a" * 40, "a" * 41], ["a" * 40, "b" * 40], ["a" * 30, "a" * 30]):
        assert all(len(name) <= 28 for name in told_apart(names, 26))
