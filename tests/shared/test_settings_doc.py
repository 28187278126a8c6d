"""The configuration reference names every key of the structs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from shared.configdoc import document, find, main, meaning, type_name
from shared.errors import ConfigError
from shared.layers import env_name, leaves
from worker.config import WorkerConfig


def test_every_key_is_there_with_its_variable_and_a_meaning() -> None:
    page = document([GatewayConfig, WorkerConfig])
    for cls in (GatewayConfig, WorkerConfig):
        for path, field in leaves(cls):
            (row,) = {line for line in page.splitlines() if f"`{env_name(path)}`" in line}
            assert f"`{field.name}`" in row
            assert meaning(field.type), path
            assert meaning(field.type).replace("|", "\\|") in row
            assert row.replace("\\|", "").count("|") == 6


def test_types_in_words() -> None:
    kinds = {path: type_name(field.type) for path, field in leaves(GatewayConfig)}
    assert kinds["listen.port"] == "integer >= 0 <= 65535"
    assert kinds["listen.headers"] == "true or false"
    assert kinds["workers.urls"] == "list of text"
    assert kinds["render.tokenizers"] == "table of text"
    assert kinds["log.level"] == "`debug` or `info` or `warning` or `error`"
    assert kinds["redis.timeout_ms"].startswith("number > 0")


def test_written_to_a_file(tmp_path: Path) -> None:
    main([str(tmp_path / "c.md"), "gateway.config:GatewayConfig", "worker.config:WorkerConfig"])
    page = (tmp_path / "c.md").read_text()
    assert page == document([GatewayConfig, WorkerConfig])
    assert "## headwater gateway" in page
    assert '| `host` | text | `"127.0.0.1"` | `HEADWATER_LISTEN__HOST` |' in page


@pytest.mark.parametrize("name", ["gateway.config:Nothing", "shared.layers:load", "shared.layers"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no settings struct"):
        find(name)
