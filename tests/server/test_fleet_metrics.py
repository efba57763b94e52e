"""One metrics page for many replicas."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cbatch.server.serving.metrics import merge
from tests.server.http_client import Client


def test_every_series_has_its_replicas_label(demo_client: Client) -> None:
    demo_client.post({"prompt": "def", "max_tokens": 3})
    with demo_client.open(None, "/metrics") as answer:
        page = answer.read()
    merged = merge([("a", page), ("b", page)]).decode()
    alone = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(page.decode())
        for s in family.samples
    }
    assert any(name == "vllm:e2e_request_latency_seconds_bucket" for name, *_ in alone)
    values: dict[str, dict[tuple[object, ...], float]] = {"a": {}, "b": {}}
    for family in text_string_to_metric_families(merged):
        for name, labels, value, *_ in family.samples:
            values[labels.pop("replica")][(name, *sorted(labels.items()))] = value
    assert values == {"a": alone, "b": alone}
    heads = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) > 20, "a family has one header"
