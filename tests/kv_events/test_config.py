"""`--kv-events-config`: vLLM's fields and defaults, and errors by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.kv_events.publisher import KVEventsConfig, binds, read_config

ON = {"enable_kv_cache_events": True}


def read(**fields: Any) -> KVEventsConfig:
    return read_config(json.dumps(ON | fields))


def test_defaults_are_those_of_vllm() -> None:
    config = read()
    assert config.publishes and config.endpoint == "tcp://*:5557" and config.topic == ""
    assert (config.hwm, config.max_queue_size) == (100_000, 100_000)
    assert (config.replay_endpoint, config.buffer_batches) == (None, 0)
    assert read(replay_endpoint="tcp://*:5558").buffer_batches == 10_000
    assert read(replay_endpoint="tcp://*:5558", buffer_steps=7).buffer_batches == 7


def test_events_are_off_by_default_and_on_by_configurations_of_vllm() -> None:
    assert not KVEventsConfig().publishes and not read_config("{}").publishes
    assert not read(publisher="null").publishes
    assert not read(enable_kv_cache_events=False, publisher="zmq").publishes
    for fields in (
        {"endpoint": "tcp://gateway:5557", "topic": "kv@10.0.0.1@model"},
        {"replay_endpoint": "tcp://0.0.0.0:5558", "buffer_steps": 10_000},
        {"hwm": 0, "max_queue_size": 1},
        {"endpoint": "ipc://kv"},
    ):
        assert read(publisher="zmq", **fields).publishes


@pytest.mark.parametrize(
    ("fields", "named", "remedy"),
    [
        ({"endpiont": "tcp://*:1"}, "endpiont", "endpoint"),
        ({"publisher": "kafka"}, "publisher", "zmq"),
        ({"hwm": "many"}, "hwm", "int"),
        ({"hwm": -1}, "hwm", "0"),
        ({"max_queue_size": 0}, "max_queue_size", "1"),
        ({"buffer_steps": 0, "replay_endpoint": "tcp://*:2"}, "buffer_steps", "1"),
        ({"buffer_steps": 100}, "buffer_steps", "replay_endpoint"),
        ({"endpoint": "5557"}, "endpoint", "tcp://*:PORT"),
        ({"endpoint": "inproc://cache"}, "endpoint", "tcp://*:PORT"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "endpoint", "tcp://*:PORT"),
        ({"replay_endpoint": "udp://*:1"}, "replay_endpoint", "tcp://*:PORT"),
        ({"topic": None}, "topic", "str"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], named: str, remedy: str) -> None:
    with pytest.raises(FieldError) as raised:
        read(**fields)
    assert raised.value.field == "kv_events_config"
    assert named in raised.value.problem
    assert remedy in f"{raised.value.problem}; {raised.value.remedy}"


@pytest.mark.parametrize("text", ["", "on", "[1]", '{"enable_kv_cache_events": tru'])
def test_invalid_json_is_reported(text: str) -> None:
    with pytest.raises(FieldError, match="kv_events_config"):
        read_config(text)


def test_endpoints_are_bound_or_connected_as_in_vllm() -> None:
    assert all(map(binds, ("tcp://*:5557", "tcp://[::]:5557", "ipc://kv")))
    assert not any(map(binds, ("tcp://gateway:5557", "tcp://10.0.0.1:5557")))
