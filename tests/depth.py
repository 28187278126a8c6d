"""How much deeper than in the ordinary suite property tests go: ``make test-slow`` sets it."""

from __future__ import annotations

import os

DEPTH = int(os.environ.get("HEADWATER_TEST_DEPTH", "1"))
