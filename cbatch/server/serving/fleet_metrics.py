"""One page for Prometheus of many replicas' pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class FleetPages(Collector):
    """`pages` are by replica, whose name becomes a label of every series."""

    def __init__(self, pages: Iterable[tuple[str, bytes]]) -> None:
        self._pages = list(pages)

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                known = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {LABEL: replica, **sample.labels}
                    known.samples.append(sample._replace(labels=labels))
        yield from merged.values()


def merge(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """In Prometheus' text format, as its parts."""
    registry = CollectorRegistry()
    registry.register(FleetPages(pages))
    return generate_latest(registry)
