"""Merges the metrics pages of many replicas into one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class FleetPages(Collector):
    """Collects the replicas' metrics from `pages`, which are (name, page) pairs. A replica's name
    becomes a label of its series."""

    def __init__(self, pages: Iterable[tuple[str, bytes]]) -> None:
        self._pages = list(pages)

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica, page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                family_of_all = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {LABEL: replica, **sample.labels}
                    family_of_all.samples.append(sample._replace(labels=labels))
        yield from merged.values()


def merge(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """Return one page in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(FleetPages(pages))
    return generate_latest(registry)
