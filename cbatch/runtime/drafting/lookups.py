"""Lookup drafters by name, and the chain of an engine's drafters."""

from __future__ import annotations

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import ModelDrafter
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.drafting.ngram import NgramLookup
from cbatch.runtime.drafting.suffix import SuffixLookup


def all_lookups() -> dict[str, Lookup]:
    """Return a lookup of each name in `LOOKUPS` of `cbatch.core.request.request`."""
    return {"ngram": NgramLookup(), "suffix": SuffixLookup()}


def chain_drafter(config: SchedulerConfig, model: ModelDrafter | None) -> ChainDrafter:
    """Return the drafters of an engine on the host; `model` is its draft model or head, if any."""
    return ChainDrafter(
        model=model,
        lookups={name: LookupDrafter(lookup) for name, lookup in all_lookups().items()},
        default=config.default_chain,
    )
