"""Alert rules, dashboard and the compose profile name only what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from promkit import faults, scraped

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "examples" / "monitoring"
series = cache(scraped)


def _rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    names = [group["name"] for group in groups]
    assert len(names) == len(set(names))
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        (MONITORING / "grafana" / "headwater.json").read_text()
    )["panels"]
    return found


def _targets() -> Iterator[tuple[str, str, str]]:
    for panel in _panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


RULES = _rules()


@pytest.mark.parametrize("name", RULES)
def test_an_alert_selects_series_that_exist(name: str) -> None:
    rule = RULES[name]
    assert list(faults(rule["expr"], series())) == []
    assert re.search(r"(==|>|<) ?[\d.(]", rule["expr"]), "no condition: it would always fire"
    assert re.fullmatch(r"\d+[sm]", rule["for"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_only_labels_that_its_result_has(name: str) -> None:
    rule = RULES[name]
    kept = {
        label
        for listed in re.findall(r"by \(([^)]*)\)", rule["expr"])
        for label in listed.split(", ")
    }
    if not kept and "sum(" not in rule["expr"]:
        kept = {"instance", "job", "source"}  # nothing is summed up: all labels stay
    said = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert said <= kept - {"le"}


def test_every_alert_has_its_entry_in_the_runbook_and_the_other_way_round() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    entries = re.split(r"^### (Headwater\w+)$", page, flags=re.MULTILINE)
    texts = dict(zip(entries[1::2], entries[2::2], strict=True))
    assert texts.keys() == RULES.keys()
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        for part in ("**Means.**", "**Check.**", "**Do.**"):
            assert part in texts[name], f"{name}: {part}"


def test_the_runbook_names_only_commands_settings_and_metrics_that_exist() -> None:
    from gateway.config import GatewayConfig

    page = (ROOT / "docs" / "operations.md").read_text()
    commands = set(re.findall(r"`headwater (\w+)", page))
    known = re.findall(
        r'^(\w+) = "\w+\.[\w.]+:app"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert commands
    assert commands <= set(known)
    for name in re.findall(r"`(headwater_\w+)", page):
        assert {name, f"{name}_count"} & series().keys(), name
    for section, key in re.findall(r"`\[(\w+)\] (\w+)", page):
        assert key in type(getattr(GatewayConfig(), section)).__struct_fields__, f"{section}.{key}"


def test_every_panel_selects_series_that_exist() -> None:
    targets = list(_targets())
    assert len(targets) > 40
    for title, expression, legend in targets:
        # a window of Grafana's own is a window like any other, and so is "all models"
        plain = expression.replace("[$__rate_interval]", "[5m]")
        assert list(faults(plain, series())) == [], title
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            said = {
                one for listed in re.findall(r"by \(([^)]*)\)", plain) for one in listed.split(", ")
            }
            assert label in said or "sum" not in plain, f"{title}: {label}"


def test_panels_do_not_overlap_and_fill_their_rows() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in _panels():
        at = panel["gridPos"]
        area = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not area & cells, panel["title"]
        assert max(x for x, _ in area) < 24
        cells |= area
    ids = [panel["id"] for panel in _panels()]
    assert len(ids) == len(set(ids))
    assert len(cells) == 24 * (1 + max(y for _, y in cells))


def test_the_dashboard_shows_every_metric_of_the_gateway() -> None:
    shown = " ".join(expression for _, expression, _ in _targets())
    rules = " ".join(rule["expr"] for rule in RULES.values())
    used = set(re.findall(r"headwater_\w+", f"{shown} {rules}"))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    ours = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in series()
        if name.startswith("headwater_") and not name.startswith("headwater_engine_")
    }
    # in the report and the registry, but no line on the board
    quiet = {"headwater_request_seconds", "headwater_index_host_blocks"}
    assert ours - bases == quiet


@pytest.mark.parametrize(
    ("spoilt", "fault"),
    [
        ("sum(rate(headwater_lost_tokens_total[5m])) > 1", "there is no"),
        ('headwater_worker_state{status="ready"} == 1', "has no label status"),
        ('headwater_worker_trust{state="exactly"} == 1', "never exactly"),
        ('rate(headwater_loss_tokens_total{reason=~"stale|policy"}[5m]) > 1', "never stale"),
        ('headwater_prediction_error_tokens_bucket{le="60.0"}', "never 60.0"),
        ("sum by (modle) (rate(headwater_shed_total[5m])) > 1", "label modle"),
        ("headwater_shed_total > 1", "needs a rate"),
        ("rate(headwater_redis_up[5m]) == 0", "is a gauge"),
        ("sum(rate(headwater_shed_total[5m]) > 1", "brackets"),
        ("summ(rate(headwater_shed_total[5m])) > 1", "summ is no function"),
        ("vector(1) > 0", "selects nothing"),
    ],
)
def test_the_reader_sees_what_is_wrong(spoilt: str, fault: str) -> None:
    assert any(fault in found for found in faults(spoilt, series())), spoilt


def test_the_profile_of_compose_mounts_what_is_there() -> None:
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services = composed["services"]
    ours = {name for name, one in services.items() if one.get("profiles") == ["monitoring"]}
    assert ours == {"prometheus", "grafana"}
    for name in ours:
        image = services[name]["image"]
        assert re.search(r":v?\d+\.\d+\.\d+\}$", image), f"{name} is not pinned"
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        for volume in services[name]["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                assert source in composed["volumes"]
    gateway = services["gateway"]["environment"]
    assert gateway["HEADWATER_LISTEN__ADMIN_TOKEN"] == "${HEADWATER_ADMIN_TOKEN:-}"
    assert composed["secrets"]["admin_token"] == {"environment": "HEADWATER_ADMIN_TOKEN"}
    assert services["prometheus"]["secrets"] == ["admin_token"]


def test_prometheus_scrapes_the_services_of_compose_on_their_ports() -> None:
    from gateway.config import ListenConfig
    from worker.config import ServeConfig

    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {one["job_name"]: one["dns_sd_configs"][0] for one in settings["scrape_configs"]}
    assert jobs["headwater-gateway"]["port"] == ListenConfig().admin_port
    assert jobs["headwater-worker"]["port"] == ServeConfig().port
    assert {name for job in jobs.values() for name in job["names"]} <= services.keys()
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["prometheus"]["volumes"])
    assert set(settings["rule_files"]) <= mounts.keys()
    assert f'up{{job="{next(iter(jobs))}"}}' in RULES["HeadwaterGatewayDown"]["expr"]


def test_grafana_finds_its_data_source_and_its_dashboard() -> None:
    grafana = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in grafana["volumes"])
    source = yaml.safe_load((MONITORING / "grafana" / "datasource.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    told = yaml.safe_load((MONITORING / "grafana" / "dashboards.yaml").read_text())
    folder = told["providers"][0]["options"]["path"]
    assert mounts[f"{folder}/headwater.json"] == "./examples/monitoring/grafana/headwater.json"
