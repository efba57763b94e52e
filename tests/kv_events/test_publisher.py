"""KV events over real sockets: sequence numbers, replays, limits, and a publisher that never waits
for clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.recorded_pool import BlocksRemoved, BlocksStored, CacheCleared
from cbatch.kv_events import publisher as publisher_module
from cbatch.kv_events.publisher import KVEventPublisher, KVEventsConfig
from cbatch.kv_events.wire import encode_changes
from tests.kv_events.client import WAIT_MS, Subscriber, subscribed

ANY = "tcp://*:0"


@contextmanager
def publishing(**fields: Any) -> Iterator[KVEventPublisher]:
    settings: dict[str, Any] = {"endpoint": ANY, "replay_endpoint": ANY} | fields
    publisher = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **settings))
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def followed(**fields: Any) -> Iterator[tuple[KVEventPublisher, Subscriber]]:
    """Wait until the subscriber is connected, since it receives no earlier messages."""
    with publishing(**fields) as publisher:
        where = publisher.endpoint, publisher.replay_endpoint
        with subscribed(*where, fields.get("topic", "")) as subscriber:
            publish_until_heard(publisher, subscriber)
            yield publisher, subscriber


def publish_until_heard(publisher: KVEventPublisher, subscriber: Subscriber) -> None:
    end_s = time.monotonic() + WAIT_MS / 1000
    while not subscriber.hear(10):
        assert time.monotonic() < end_s
        publisher.publish(encode_changes([CacheCleared()], 0.0))
    while subscriber.next_seq < publisher.num_published:
        assert subscriber.hear(WAIT_MS)


def stored(first: int, count: int = 1) -> bytes:
    """Return the event of a stored chain of blocks."""
    hashes = [*range(first, first + count)]
    return encode_changes([BlocksStored(hashes, None, hashes * 4, None)], 1.5, 4)


def test_a_message_is_topic_number_batch() -> None:
    with followed(topic="kv@pod@model") as (publisher, subscriber):
        publisher.publish(stored(7))
        assert subscriber.hear(WAIT_MS)
        assert [*subscriber.follower.blocks] == [7]
        assert subscriber.num_gaps <= 1  # published before it was connected


def test_dropped_batches_are_counted_and_can_be_replayed() -> None:
    """Bursts are published through a queue of three batches, without waiting."""
    with followed(max_queue_size=3) as (publisher, subscriber):
        begin_s, gaps = time.thread_time(), subscriber.num_gaps
        for first in range(3000):
            publisher.publish(stored(first))
        assert time.thread_time() - begin_s < 1
        assert publisher.num_dropped > 100
        subscriber.catch_up()
        assert len(subscriber.follower.blocks) == 3000
        for _ in range(50):  # earlier messages are no longer needed
            subscriber.hear()
        dropped = publisher.num_dropped
        for first in range(3000, 4000):
            publisher.publish(stored(first))
            if first % 100 == 0:
                time.sleep(0.001)
        while publisher._queue.qsize():
            time.sleep(0.001)
        publisher.publish(encode_changes([BlocksRemoved([0])], 2.0))
        while subscriber.next_seq < publisher.num_published:
            assert subscriber.hear(WAIT_MS)
        assert len(subscriber.follower.blocks) == 3999
        assert subscriber.num_gaps > gaps and publisher.num_dropped > dropped


def test_only_the_last_batches_are_buffered() -> None:
    with followed(buffer_steps=5) as (publisher, subscriber):
        for first in range(20):
            publisher.publish(stored(first))
        last = publisher.num_published
        assert [seq for seq, _ in subscriber.replay(0)] == [*range(last - 5, last)]
        assert [seq for seq, _ in subscriber.replay(last - 2)] == [last - 2, last - 1]
        assert [*subscriber.replay(last)] == []
        assert [batch for _, batch in subscriber.replay(last - 1)] == [stored(19)]


def test_the_publisher_connects_to_a_listening_gateway(tmp_path: Path) -> None:
    context = zmq.Context()
    gateway = context.socket(zmq.SUB)
    gateway.subscribe(b"")
    port = gateway.bind_to_random_port("tcp://127.0.0.1")
    try:
        with publishing(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None) as publisher:
            assert publisher.replay_endpoint is None
            end_s = time.monotonic() + WAIT_MS / 1000
            while not gateway.poll(10):
                assert time.monotonic() < end_s
                publisher.publish(stored(1))
            topic, _, batch = gateway.recv_multipart()
            assert (topic, batch) == (b"", stored(1))
    finally:
        context.destroy(linger=0)


def test_a_client_that_does_not_read_delays_no_other_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "REPLAY_TIMEOUT_MS", 200)
    context = zmq.Context()
    with followed() as (publisher, subscriber):
        for _ in range(4000):
            publisher.publish(b"x" * 20_000)
        deaf = context.socket(zmq.DEALER)
        deaf.rcvhwm = 1
        assert publisher.replay_endpoint is not None
        deaf.connect(publisher.replay_endpoint.replace("0.0.0.0", "127.0.0.1"))
        deaf.send_multipart([b"", bytes(8)])
        deaf.send_multipart([b"what", b"is", b"this"])
        begin_s = time.thread_time()
        publisher.publish(stored(1))
        assert time.thread_time() - begin_s < 0.1
        last = publisher.num_published - 1
        assert [*subscriber.replay(last)] == [(last, stored(1))]
        context.destroy(linger=0)


def test_the_last_batches_are_sent_before_closing() -> None:
    with followed() as (publisher, subscriber):
        for first in range(500):
            publisher.publish(stored(first))
        publisher.close()
        while len(subscriber.follower.blocks) < 500:
            assert subscriber.hear(WAIT_MS)
        assert not [t for t in threading.enumerate() if t in publisher._threads]


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_endpoint_in_use_is_reported(field: str) -> None:
    with publishing() as other:
        taken = other.endpoint.replace("0.0.0.0", "*")
        with (
            pytest.raises(FieldError, match=f"kv_events_config: {field}.*free"),
            publishing(**{field: taken}),
        ):
            pass
