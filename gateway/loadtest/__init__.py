"""``headwater bench``: real load against a running cluster, measured from outside."""

from __future__ import annotations
