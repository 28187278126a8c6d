"""Loading settings: layers, coercion, and errors that name the key (case F06)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from gateway.config import GatewayConfig
from shared.errors import ConfigError
from shared.layers import PROCESS_SECTIONS, env_name, leaves
from shared.settings import DeploymentConfig, LogConfig, RedisConfig, doc, load
from worker.config import WorkerConfig


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65535), doc("A port.")] = 80
    ratio: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    on: bool = False
    name: str = "n"
    mode: Literal["slow", "fast"] = "slow"
    urls: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    table: dict[str, str] = {}
    maybe: int | None = None
    admin_token: str = ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two sections."""

    inner: Inner = Inner()
    other: LogConfig = LogConfig()


def read(
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
) -> Config:
    return load(Config, file=file, env=env or {}, flags=flags or {})


def failing(**sources: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(**sources)
    assert "\n" not in str(caught.value)
    return caught.value


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_without_sources_there_are_the_defaults() -> None:
    assert read() == Config()


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = toml(
        tmp_path, "[inner]\nport = 1\nname = 'f'\nmode = 'fast'\n[other]\nlevel = 'debug'\n"
    )
    env = {"HEADWATER_INNER__PORT": "2", "HEADWATER_INNER__NAME": "e"}
    made = read(file=file, env=env, flags={"inner.port": 3, "inner.name": None})
    assert (made.inner.port, made.inner.name, made.inner.mode) == (3, "e", "fast")
    assert made.other.level == "debug"
    assert made.inner.ratio == 1.0


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("port", "8080", 8080),
        ("port", " 8080 ", 8080),
        ("ratio", "2", 2.0),
        ("ratio", "1e-3", 0.001),
        ("on", "true", True),
        ("on", "1", True),
        ("on", "YES", True),
        ("on", "off", False),
        ("name", " with space ", " with space "),
        ("name", "12", "12"),
        ("name", "", ""),
        ("mode", "fast", "fast"),
        ("urls", "http://a, http://b", ("http://a", "http://b")),
        ("urls", "", ()),
        ("urls", '["a,b"]', ("a,b",)),
        ("sizes", "1,2", (1, 2)),
        ("table", '{"a": "b"}', {"a": "b"}),
        ("maybe", "5", 5),
    ],
)
def test_text_of_the_environment_is_coerced(key: str, text: str, value: object) -> None:
    made = read(env={f"HEADWATER_INNER__{key.upper()}": text})
    assert getattr(made.inner, key) == value


def test_flags_may_be_values_or_text() -> None:
    made = read(
        flags={"inner.urls": ["a"], "inner.sizes": "1,2", "inner.on": False, "inner.port": "9"}
    )
    assert (made.inner.urls, made.inner.sizes, made.inner.on, made.inner.port) == (
        ("a",), (1, 2), False, 9
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "value", "reason"),
    [
        ("[inner]\nprot = 1", "inner.prot", 1, "did you mean inner.port?"),
        ("[iner]\nport = 1", "iner", {"port": 1}, "did you mean inner?"),
        ("[inner]\nlevel = 'x'", "inner.level", "x", "unknown key"),
        ("inner = 1", "inner", 1, "is a section"),
        ("[inner]\nport = 'x'", "inner.port", "x", "Expected `int`"),
        ("[inner]\nport = '80'", "inner.port", "80", "Expected `int`, got `str`"),
        ("[inner]\nport = -1", "inner.port", -1, ">= 0"),
        ("[inner]\nport = 65536", "inner.port", 65536, "<= 65535"),
        ("[inner]\nport = true", "inner.port", True, "Expected `int`"),
        ("[inner]\nratio = 0", "inner.ratio", 0, "> 0"),
        ("[inner]\nratio = nan", "inner.ratio", None, "> 0"),
        ("[inner]\nmode = 'quick'", "inner.mode", "quick", "must be one of slow, fast"),
        ("[inner]\nurls = ['a', 1]", "inner.urls[1]", ["a", 1], "Expected `str`"),
        ("[inner]\nurls = 'a'", "inner.urls", "a", "Expected `array`"),
        ("[inner]\ntable = {a = 1}", "inner.table[...]", {"a": 1}, "Expected `str`"),
        ("[inner]\nadmin_token = 5", "inner.admin_token", "***", "Expected `str`"),
    ],
)
def test_errors_of_the_file(
    tmp_path: Path, text: str, key: str, value: object, reason: str
) -> None:
    error = failing(file=toml(tmp_path, text))
    assert error.key == key
    assert reason in error.reason
    assert "$" not in str(error)
    if value is not None:
        assert error.value == value


@pytest.mark.parametrize(
    ("name", "text", "key", "reason"),
    [
        ("INNER__PROT", "1", "inner.prot", "did you mean HEADWATER_INNER__PORT?"),
        ("INER__PORT", "1", "iner.port", "did you mean HEADWATER_INNER__PORT?"),
        ("INNER__LEVEL", "x", "inner.level", "did you mean HEADWATER_OTHER__LEVEL?"),
        ("NOWHERE__AT_ALL", "1", "nowhere.at_all", "unknown key (from HEADWATER_NOWHERE__AT_ALL)"),
        ("INNER__PORT", "x", "inner.port", "Expected `int` (from HEADWATER_INNER__PORT)"),
        ("INNER__PORT", "-1", "inner.port", ">= 0"),
        ("INNER__ON", "maybe", "inner.on", "true or false"),
        ("INNER__MODE", "x", "inner.mode", "must be one of slow, fast"),
        ("INNER__TABLE", "{", "inner.table", "not valid JSON"),
        ("INNER__TABLE", '{"a": 1}', "inner.table[...]", "Expected `str`"),
        ("INNER__URLS", "[1", "inner.urls", "not valid JSON"),
        ("INNER__SIZES", "1,b", "inner.sizes[1]", "Expected `int`"),
    ],
)
def test_errors_of_the_environment(name: str, text: str, key: str, reason: str) -> None:
    error = failing(env={f"HEADWATER_{name}": text})
    assert (error.key, error.value) == (key, text)
    assert reason in error.reason


def test_a_secret_is_never_shown() -> None:
    assert "hush" not in str(failing(env={"HEADWATER_OTHR__API_KEY": "hush"}))
    assert "hush" not in str(failing(env={"HEADWATER_INNER__SECRET": "hush"}))


def test_other_names_of_the_environment_are_ignored() -> None:
    env = {"HEADWATER_HOME": "x", "HEADWATER": "y", "OTHER__X": "z", "PATH": "p"}
    assert read(env=env) == Config()


def test_a_lacking_underscore_in_the_environment_is_told() -> None:
    error = failing(env={"HEADWATER_INNER_PORT": "1"})
    assert error.key == "inner.port"
    assert "HEADWATER_INNER__PORT" in error.reason
    assert "HEADWATER_INNER_PORT" in error.reason


def test_an_unknown_flag_is_an_error() -> None:
    error = failing(flags={"inner.prt": 1})
    assert (error.key, error.reason) == ("inner.prt", "unknown key; did you mean inner.port?")


@pytest.mark.parametrize("text", ["x =", "[a\n", "a = 1\na = 2"])
def test_a_malformed_file_is_one_error(tmp_path: Path, text: str) -> None:
    file = toml(tmp_path, text)
    error = failing(file=file)
    assert (error.key, error.value) == ("file", str(file))
    assert "TOML" in error.reason


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in failing(file=tmp_path / "none.toml").reason
    assert "directory" in failing(file=tmp_path).reason
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "TOML" in failing(file=binary).reason


class Strict(msgspec.Struct, frozen=True):
    """Has a required key and a check of its own."""

    low: int
    high: int = 5

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


class Whole(msgspec.Struct, frozen=True):
    """One section."""

    strict: Strict


def test_required_keys_and_checks_over_several_keys() -> None:
    with pytest.raises(ConfigError, match=r"strict\.low: None: is required"):
        load(Whole, file=None, env={}, flags={})
    with pytest.raises(ConfigError, match="strict: '': low is above high"):
        load(Whole, file=None, env={}, flags={"strict.low": 6})
    assert load(Whole, file=None, env={}, flags={"strict.low": 1}) == Whole(Strict(1))


@pytest.mark.parametrize("cls", [GatewayConfig, WorkerConfig])
def test_every_key_can_be_given_in_the_environment(cls: type[msgspec.Struct]) -> None:
    for path, field in leaves(cls):
        default = field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()
        text = default if isinstance(default, str) else msgspec.json.encode(default).decode()
        assert load(cls, file=None, env={env_name(path): text}, flags={}) == cls(), path


def test_variables_of_the_other_process_are_no_mistake() -> None:
    env = {"HEADWATER_MODEL__PATH": "x", "HEADWATER_LISTEN__PORT": "9"}
    assert load(GatewayConfig, file=None, env=env, flags={}).listen.port == 9
    assert load(WorkerConfig, file=None, env=env, flags={}).model.path == "x"


def test_the_list_of_process_sections_is_complete() -> None:
    names = [{f.name for f in msgspec.structs.fields(c)} for c in (GatewayConfig, WorkerConfig)]
    assert names[0] ^ names[1] == PROCESS_SECTIONS


def test_the_hash_key_is_the_secret_or_the_name() -> None:
    assert DeploymentConfig(name="d").hash_key == b"d"
    assert DeploymentConfig(name="d", secret="s").hash_key == b"s"
    with pytest.raises(ConfigError, match=r"deployment\.name"):
        load(GatewayConfig, file=None, env={}, flags={"deployment.name": "a b"})
    assert RedisConfig().url == "none"
