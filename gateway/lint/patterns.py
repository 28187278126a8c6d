"""Values that applications fill in, as patterns: dates and times of common languages, ids, numbers.

Names of months and days are those of the calendars that web sites write most (English, German,
French, Spanish, Italian, Portuguese, Dutch); Chinese, Japanese and Korean dates go by their signs.
"""

from __future__ import annotations

import re

_MONTH = (
    r"(?:jan|ene|gen|feb|f[ée]v|mar|m[äa]r|maa|mrt|apr|abr|avr|mai|may|mag|mei|jun|juin|giu|jul|"
    r"juil|lug|aug|ao[uû]|ago|sep|set|oct|okt|out|ott|nov|dec|d[ée]c|dez|dic)[^\W\d_]*\.?"
)
_DAY = (
    r"(?:(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?|"
    r"(?:mon|diens|donners|frei|sams|sonn)tag|mittwoch|"
    r"lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche|"
    r"lunes|martes|mi[ée]rcoles|jueves|viernes|s[áa]bado|domingo|"
    r"(?:luned|marted|mercoled|gioved|venerd)[iì]|sabato|domenica|"
    r"(?:segunda|ter[çc]a|quarta|quinta|sexta)-feira|"
    r"(?:maan|dins|woens|donder|vrij|zater|zon)dag)"
)
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
_PATTERNS = (
    ("uuid", r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    ("date", rf"\b\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:[T ]{_CLOCK}[^\s.,;\])]*)?"),
    ("date", r"\b\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b"),
    ("date", rf"\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b"),
    (
        "date",
        rf"\b\d{{1,2}}(?:st|nd|rd|th|er|[.º])?\s+(?:de\s+|of\s+)?{_MONTH}"
        r"(?:(?:,|\s+del?)?\s+\d{4})?\b",
    ),
    ("date", rf"\b{_MONTH}\s+\d{{4}}\b"),
    ("date", r"(?:\d{4}\s?[年년]\s?)?\d{1,2}\s?[月월](?:\s?\d{1,2}\s?[日일])?"),
    ("date", rf"\b{_DAY}\b(?:,?\s+{_MONTH})?"),
    ("date", rf"\b{_CLOCK}\s*(?:[ap]\.?m\.?)?"),
    ("date", r"\b1[5-9]\d{8}(?:\d{3}){0,3}\b"),
    ("id", r"\b[\w.+-]+@[\w-]+\.[\w.]+\b"),
    ("id", r"\b(?=[\w-]*\d)(?=[\w-]*[a-z_-])[\w-]{5,}\b"),
    ("id", r"\b[0-9a-f]{8,}\b"),
    ("id", r"\b\d{6,}\b"),
    ("number", r"\d+(?:[.,]\d+)*"),
)
KINDS = {
    kind: re.compile("|".join(p for name, p in _PATTERNS if name == kind), re.IGNORECASE)
    for kind, _ in _PATTERNS
}
"""In the order in which they are tried."""
MARKUP = re.compile(
    r"</?[^\s<>][^<>\n]{0,40}>|^\s*#{1,6}\s|\[/?[A-Z_]+\]|```|={3,}|-{3,}|\*\*", re.MULTILINE
)
"""Tags, headings and rules, as templates write them around text."""
