"""``headwater lint``: where prompts that say the same part ways, why, and what that costs."""

from __future__ import annotations

from gateway.lint.check import Settings, check
from gateway.lint.findings import Finding, LintResult
from gateway.lint.read import LintError, Prompt, read_prompts

__all__ = ["Finding", "LintError", "LintResult", "Prompt", "Settings", "check", "read_prompts"]
