"""Lookup drafters by name."""

from __future__ import annotations

from cbatch.runtime.drafting.lookup import Lookup
from cbatch.runtime.drafting.ngram import NgramLookup
from cbatch.runtime.drafting.suffix import SuffixLookup


def all_lookups() -> dict[str, Lookup]:
    """Return a lookup of each name in `LOOKUPS` of `cbatch.core.request.request`."""
    return {"ngram": NgramLookup(), "suffix": SuffixLookup()}
