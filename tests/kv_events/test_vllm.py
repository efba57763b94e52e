"""vLLM as client and reference: it decodes cbatch's events with its own types, and its publisher
sends the same bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cbatch.core.scheduler.recorded_pool import BlocksRemoved, BlocksStored, CacheCleared
from cbatch.kv_events.publisher import KVEventPublisher, KVEventsConfig
from cbatch.kv_events.wire import encode_changes
from tests.kv_events.client import subscribed

PYTHON = os.environ.get("VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)
CHANGES = [
    [CacheCleared()],
    [
        BlocksStored([2**64 - 1, 5], None, [*range(8)], None),
        BlocksStored([7], 5, [9, 9, 2**31 - 1, 0], None),
    ],
    [BlocksStored([8], None, [1, 2, 3, 4], "salt"), BlocksRemoved([7, 5])],
]


@contextmanager
def running_vllm(source: str, endpoint: str, replay_endpoint: str) -> Iterator[dict[str, Any]]:
    assert PYTHON is not None
    script = Path(__file__).parent / "vllm_client.py"
    pipe = subprocess.PIPE
    command = [PYTHON, str(script), source, endpoint, replay_endpoint]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        first = next((line for line in process.stdout if line.startswith("{")), None)
        assert first is not None, "vLLM's program printed nothing"
        yield json.loads(first)
        process.stdin.close()


@pytest.mark.skipif(PYTHON is None, reason="no vLLM here: VLLM_PYTHON names a Python that has it")
def test_vllm_reads_and_writes_the_same_bytes(tmp_path: Path) -> None:
    batches = [encode_changes(each, 12.25, 4) for each in CHANGES]
    source, live, replays = (f"ipc://{tmp_path}/{name}" for name in ("ours", "live", "replays"))
    config = KVEventsConfig(True, None, f"ipc://{tmp_path}/pub", source)
    publisher = KVEventPublisher(config)
    try:
        for batch in batches:
            publisher.publish(batch)
        with running_vllm(source, live, replays) as output, subscribed(live, replays) as subscriber:
            replayed = [*subscriber.replay(0)]
            with subscribed(config.endpoint, source) as other:
                assert replayed == [*other.replay(0)] == [*enumerate(batches)]
    finally:
        publisher.close()
    _, (first, second), third = [events for _, events, _ in output["batches"]]
    assert first == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 5],
        "parent_block_hash": None,
        "token_ids": [*range(8)],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert second["parent_block_hash"] == 5
    assert third[0]["extra_keys"] == [["salt"]] and third[1]["block_hashes"] == [7, 5]
    defaults = output["config"]
    assert (defaults.pop("publisher"), defaults.pop("buffer_steps")) == ("null", 10_000)
    assert defaults == {name: getattr(KVEventsConfig(), name) for name in defaults}
