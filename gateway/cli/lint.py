"""``headwater lint``: why prompts that say the same do not begin the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.packed import BrokenOff, is_packed, lines_of
from shared.errors import ConfigError

if TYPE_CHECKING:  # only loaded when the command runs
    from gateway.lint import Prompt
    from shared.bundle import TokenizerBundle

FORMATS = ("text", "json")

_CHARS_PER_TOKEN = 4.0
_COUNTED = 64
"""Prompts whose tokens are counted; the others have as many per character."""

app = typer.Typer()


@app.command(
    epilog="Example: headwater lint requests.jsonl   |   "
    "headwater lint batch.jsonl.gz --model ./model --requests-per-day 250000 --format json"
)
def lint(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl",
            help="Requests as JSON lines (.gz too): bodies of chat or text completions, lines of a "
            "batch file, or recorded sessions; with 'timestamp' if there is one. Or a ledger's "
            "folder, where \\[ledger] samples_per_minute had some requests kept.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Folder or hub id of the model: tokens are counted with its tokenizer, and its "
            "chat template is looked at. Without it a token is 4 characters.",
            show_default=False,
        ),
    ] = "",
    requests_per_day: Annotated[
        float | None,
        typer.Option(
            help="What the costs are told for. Default: by the times in the file; without times "
            "the file counts as one day.",
            show_default=False,
        ),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(help="Losses of fewer tokens in a request are passed over.")
    ] = 64,
    prefill_rate: Annotated[
        float, typer.Option(help="Prompt tokens a second that a worker computes.")
    ] = 10_000.0,
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Where prompts that should share a prefix part, what that costs a day, and what to move."""
    from gateway.lint import LintError, Settings, check, read_prompts
    from gateway.lint.text import to_json, to_text

    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    if min_tokens < 1:
        raise ConfigError("--min-tokens", min_tokens, "must be at least 1")
    for flag, number in (
        ("--prefill-rate", prefill_rate),
        ("--requests-per-day", 1.0 if requests_per_day is None else requests_per_day),
    ):
        if not 0 < number < float("inf"):
            raise ConfigError(flag, number, "must be a number above 0")
    bundle = _bundle(model) if model else None
    try:
        prompts = list(read_prompts(_lines(file)))
    except LintError as error:
        raise ConfigError("FILE.jsonl", str(file), str(error)) from error
    if not prompts:
        raise ConfigError("FILE.jsonl", str(file), "there is no request in it")
    settings = Settings(
        least_tokens=min_tokens,
        prefill_tokens_per_s=prefill_rate,
        requests_per_day=requests_per_day,
        chars_per_token=_CHARS_PER_TOKEN if bundle is None else _density(bundle, prompts),
    )
    result = check(_watched(prompts), settings)
    if form == "json":
        typer.echo(to_json(result), nl=False)
        return
    notes = () if bundle is None else _notes(bundle)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(to_text(result, file.name, notes=notes, colour=colour), nl=False)


def _lines(path: Path) -> Iterator[bytes]:
    """Of a file, or of the samples in a ledger's folder, oldest first."""
    for file in _samples(path) if path.is_dir() else [path]:
        yield from _lines_of(file)


def _samples(folder: Path) -> list[Path]:
    from gateway.ledgerfile import NAME
    from gateway.samples import FOLDER

    inner = folder / FOLDER
    kept = inner if inner.is_dir() or folder.name != FOLDER else folder
    found = sorted(file for file in kept.glob("*") if NAME.match(file.name))
    if not found:
        reason = "holds no samples of requests: [ledger] samples_per_minute has a gateway keep some"
        raise ConfigError("FILE.jsonl", str(folder), reason)
    return found


def _lines_of(file: Path) -> Iterator[bytes]:
    number = 0
    try:
        for line in lines_of(file, packed=is_packed(file)):
            number += 1
            yield line
    except BrokenOff as error:
        told = f"{error} (line {number + 1}): what else was in it is lost"
        if not number:
            raise ConfigError("FILE.jsonl", str(file), told) from error
        typer.echo(f"headwater: {file}: {told}", err=True)
    except OSError as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("FILE.jsonl", str(file), reason) from error


def _bundle(model: str) -> TokenizerBundle:
    from shared.bundle import BundleError, load_bundle

    try:
        return load_bundle(model)
    except BundleError as error:
        raise ConfigError("--model", model, str(error)) from error


def _density(bundle: TokenizerBundle, prompts: Sequence[Prompt]) -> float:
    """Characters per token, as counted on the first prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    texts = [part.text for prompt in prompts[:_COUNTED] for part in prompt.parts]
    tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
    return sum(map(len, texts)) / tokens if tokens else _CHARS_PER_TOKEN


def _notes(bundle: TokenizerBundle) -> tuple[str, ...]:
    """What the model's own template does to prefixes."""
    template = bundle.chat_template or ""
    if "strftime_now" in template:
        return (
            "The model's chat template writes today's date into prompts: each day begins with cold "
            "caches. Fix: give the date in 'chat_template_kwargs', or change the template.",
        )
    return ()


def _watched(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """A bar on a terminal while large files are read."""
    if not sys.stderr.isatty() or len(prompts) < 1000:
        yield from prompts
        return
    from rich.progress import track

    yield from track(prompts, description="compared")
