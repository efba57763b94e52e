"""A client that follows a simulated hour by its events alone, over real sockets and with losses,
always knows the contents of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.kv_events.publisher import KVEventPublisher, KVEventsConfig
from cbatch.kv_events.wire import encode_changes
from sim.replay.replay import replay
from sim.report.report import to_json
from sim.report.timeline import TimelineStep
from sim.workload.arrivals import poisson
from sim.workload.generate import Conversations, converse
from sim.workload.lengths import uniform
from sim.workload.sources import OpenLoop
from sim.workload.traces.request import TraceRequest
from tests.checking.follower import cached_prefixes
from tests.kv_events.client import Subscriber
from tests.sim.replays import config_for, executor_for, speculating

HOUR_S = 3600.0


def hour(sessions: int = 150) -> list[TraceRequest]:
    """Return conversations that begin with one of three system prompts."""
    made = Conversations(
        turns=uniform(1, 5),
        messages=uniform(20, 200),
        outputs=uniform(5, 40),
        system_prompts=3,
        system_prompt_tokens=256,
        think_s=20.0,
    )
    rate = sessions / HOUR_S
    return list(converse(lambda rng: poisson(rate, rng), made, sessions=sessions, seed=4))


class Gateway:
    """An observer of a replay that publishes every step's events, and compares now and then.
    Messages are lost in the publisher's short queue, and on the network."""

    def __init__(self, folder: Path, every_steps: int) -> None:
        self._every_steps = every_steps
        endpoint, replays = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=endpoint,
            replay_endpoint=replays,
            max_queue_size=20,
        )
        self.publisher = KVEventPublisher(config)
        self.subscriber = Subscriber(endpoint, replays, loses=lambda seq: seq % 7 == 3)
        self.num_steps = self.num_looks = 0
        self.sizes: set[int] = set()

    def step(self, step: TimelineStep) -> None:
        scheduler = step.scheduler
        changes = scheduler.take_cache_changes()
        if changes:
            size = scheduler.config.block_size
            self.publisher.publish(encode_changes(changes, step.ended_s, size))
        self.subscriber.hear()
        self.num_steps += 1
        if self.num_steps % self._every_steps == 0:
            self.look(scheduler)

    def look(self, scheduler: Any) -> None:
        while self.subscriber.hear():
            pass
        if self.subscriber.next_seq < self.publisher.num_published:
            self.subscriber.catch_up()
        prefixes = self.subscriber.follower.prefixes
        assert prefixes == cached_prefixes(scheduler.state.pool)
        self.sizes.add(len(prefixes))
        self.num_looks += 1

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()


def follow(
    requests: Iterable[TraceRequest], config: SchedulerConfig, folder: Path, every_steps: int
) -> Gateway:
    gateway = Gateway(folder, every_steps)
    try:
        replay(OpenLoop(requests), config, executor_for(config), observers=[gateway])
    finally:
        gateway.close()
    assert gateway.subscriber.num_gaps > 20 and gateway.subscriber.num_replayed > 20
    assert min(gateway.subscriber.follower.num_events.values()) > 20, "stored and removed"
    return gateway


def test_an_hour_is_followed(tmp_path: Path) -> None:
    config = config_for(kv_events=True, **speculating(3))
    gateway = follow(hour(), config, tmp_path, every_steps=50)
    assert gateway.num_looks > 60 and max(gateway.sizes) > 300


def test_to_be_followed_moves_nothing() -> None:
    """A followed replay has the same steps at the same times."""
    requests = hour(60)
    reports = [
        to_json(replay(OpenLoop(requests), config, executor_for(config)))
        for kv_events in (False, True)
        for config in [config_for(kv_events=kv_events, num_blocks=150, **speculating(3))]
    ]
    assert reports[0] == reports[1]
