"""A gateway's client of KV events. It subscribes, detects gaps by sequence numbers, and requests
replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from cbatch.kv_events.publisher import END
from tests.checking.follower import Follower

WAIT_MS = 10_000


class Subscriber:
    """A subscriber. `loses(number)` returns True for messages to treat as lost."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        loses: Callable[[int], bool] = lambda seq: False,
    ) -> None:
        self._loses = loses
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(self._topic)
        self._sub.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self._replays: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._replays = self._context.socket(zmq.DEALER)
            self._replays.connect(replay_endpoint.replace("0.0.0.0", "127.0.0.1"))
        self.follower = Follower()
        self.next_seq = 0
        self.num_gaps = self.num_replayed = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hear(self, wait_ms: int = 0) -> bool:
        """Receive a message, if there is one, after filling a gap before it."""
        if not self._sub.poll(wait_ms):
            return False
        topic, seq_bytes, batch = self._sub.recv_multipart()
        assert topic == self._topic
        seq = int.from_bytes(seq_bytes, "big")
        if self._loses(seq):
            return True
        if seq > self.next_seq:
            self.num_gaps += 1
            self.catch_up()
        if seq == self.next_seq:  # it may have been replayed already
            self._take(batch)
        return True

    def catch_up(self) -> None:
        """Replay all missed messages."""
        for seq, batch in self.replay(self.next_seq):
            assert seq == self.next_seq, "missed messages are no longer buffered"
            self._take(batch)
            self.num_replayed += 1

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        assert self._replays is not None
        self._replays.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert self._replays.poll(WAIT_MS), "no replay"
            empty, topic, seq, batch = self._replays.recv_multipart()
            assert empty == b""
            if seq == END:
                assert (topic, batch) == (b"", b"")
                return
            assert topic == self._topic
            yield int.from_bytes(seq, "big"), batch

    def _take(self, batch: bytes) -> None:
        self.follower.take(batch)
        self.next_seq += 1


@contextmanager
def subscribed(
    endpoint: str,
    replay_endpoint: str | None = None,
    topic: str = "",
    loses: Callable[[int], bool] = lambda seq: False,
) -> Iterator[Subscriber]:
    subscriber = Subscriber(endpoint, replay_endpoint, topic, loses)
    try:
        yield subscriber
    finally:
        subscriber.close()
