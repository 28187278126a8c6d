"""A check's result as a page of text, and as JSON."""

from __future__ import annotations

import msgspec

from gateway.lint.findings import Finding, LintResult
from gateway.report.tables import Page, counted, percent

_FROM = {
    "times": "as the times in the file say",
    "given": "as given",
    "file": "the file taken as one day; --requests-per-day says otherwise",
}


def to_json(result: LintResult) -> str:
    """One JSON object and a newline."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def to_text(result: LintResult, name: str, *, notes: tuple[str, ...] = (), colour: bool) -> str:
    """Findings with their cost and remedy, the dearest first."""
    page = Page(colour=colour)
    page.line(
        f"{name}: {counted(result.prompts, 'prompt')}, {counted(result.tokens, 'token')} before "
        f"the first answer, {result.requests_per_day:,.0f} requests a day "
        f"({_FROM[result.per_day_from]})",
        "bold",
    )
    if result.tokens:
        page.line(
            f"{percent(result.reused_tokens / result.tokens)} begin like an earlier prompt; "
            f"{percent(result.lost_tokens / result.tokens)} would too, but for what follows."
        )
    for note in notes:
        page.line()
        page.line(note)
    if not result.findings:
        page.line()
        page.line("Nothing found: prompts that say the same begin the same.")
    for number, finding in enumerate(result.findings, 1):
        _show(page, number, finding)
    return page.text()


def _show(page: Page, number: int, finding: Finding) -> None:
    page.heading(
        f"{number}. {finding.cause.replace('_', ' ')} in {finding.part}, after "
        f"{counted(finding.after_tokens, 'token')}"
    )
    page.line(
        f"costs {counted(finding.tokens_per_day, 'token')} a day, {finding.seconds_per_day:,.1f} "
        f"seconds of prefill; {counted(finding.requests, 'prompt')} of this file"
    )
    if finding.before.strip():
        page.line(f"after: ...{' '.join(finding.before.split())}")
    shown = [f"{value[:48]!r}" for value in finding.examples]
    page.line(f"as in: {', '.join(shown)}")
    page.line(f"lines: {', '.join(map(str, finding.lines))}")
    page.line(f"fix:   {finding.remedy}")
