"""The hit-rate report: what of the prompts could be reused, was, and where the rest went."""

from gateway.report.csvform import to_csv
from gateway.report.html import to_html
from gateway.report.jsonform import to_json
from gateway.report.load import EmptyLedger, LedgerError
from gateway.report.model import Report
from gateway.report.sources import parse_since, read_ledger
from gateway.report.summary import parse_by, summarise
from gateway.report.text import to_text

__all__ = [
    "EmptyLedger",
    "LedgerError",
    "Report",
    "parse_by",
    "parse_since",
    "read_ledger",
    "summarise",
    "to_csv",
    "to_html",
    "to_json",
    "to_text",
]
