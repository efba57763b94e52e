from __future__ import annotations

import re

import msgspec
import pytest

from cbatch.core.scheduler.events import Configured, ExecutorReset, Failed, Planned
from cbatch.steplog.recorder import StepRecorder
from cbatch.steplog.step_log import StepLogError, encode_array, engines_of, read_step_log, replay
from tests.checking.executor import Faults
from tests.checking.invariants import check_scheduler
from tests.helpers import World, make_config, make_request


def busy_world(log, depth, **more):
    """Return a run with all events: preemption, faults, cancel, finish, non-finite rows,
    sharing."""
    config = make_config(
        num_blocks=16,
        lookahead="ema:3",
        queue_policy="shortest",
        ageing_per_s=3.0,
        eos_ids=(7,),
        **more,
    )
    faults = Faults(raise_at_runs=frozenset({6, 20, 21, 22, 23}), non_finite_at={"r3": 2})
    world = World(config, depth=depth, log=log, faults=faults)
    prefix = tuple(range(100, 112))
    for i in range(10):
        salt = "a" if i % 4 == 3 else None
        fields = {"max_tokens": 8 + i, "temperature": 0.5, "cache_salt": salt}
        world.add(make_request(f"r{i}", (*prefix, i), seed=i, **fields))
        world.step()
        world.step()
    world.scheduler.cancel("r8", world.clock())
    if len(world.shown["r5"]) >= 2:
        world.scheduler.finish("r5", 1, world.clock())
    world.run()
    return world


def encode(value):
    return msgspec.msgpack.encode(value, enc_hook=encode_array)


@pytest.mark.parametrize(("depth", "kv_events"), [(0, False), (1, False), (0, True), (1, True)])
def test_replay_reproduces_every_decision(tmp_path, depth, kv_events):
    """Trap 8 (replicas that do not follow from their inputs differ)."""
    path = tmp_path / "steps.jsonl"
    with StepRecorder(path) as log:
        world = busy_world(log, depth, kv_events=kv_events)
    assert world.scheduler.stats.preemptions > 0
    assert world.scheduler.stats.prefix_hit_tokens > 0
    read = read_step_log(path)
    assert read.warning is None
    assert any(isinstance(event, ExecutorReset) for event in read.events)
    assert any(isinstance(event, Failed) for event in read.events)
    plans, commits, again = [], [], []
    scheduler = replay(
        read.events, on_plan=plans.append, on_commit=commits.append, log=again.append
    )
    check_scheduler(scheduler)
    assert [encode(p) for p in plans if p is not None] == [encode(p) for p in world.plans]
    assert [list(map(str, c.updates())) for c in commits] == [
        list(map(str, c.updates())) for c in world.commits
    ]
    assert [encode(c.finished) for c in commits] == [encode(c.finished) for c in world.commits]
    assert scheduler.stats == world.scheduler.stats
    assert encode(again) == encode(read.events)


def test_a_log_of_before_salts_is_read(tmp_path):
    path = tmp_path / "steps.jsonl"
    content = short_log(path)
    events = read_step_log(path).events
    assert content.count(b',"cache_salt":null') == 1
    path.write_bytes(content.replace(b',"cache_salt":null', b""))
    assert encode(read_step_log(path).events) == encode(events)


def short_log(path):
    with StepRecorder(path) as log:
        world = World(log=log)
        world.add(make_request("a", max_tokens=3))
        world.run()
    return path.read_bytes()


@pytest.mark.parametrize("cut_bytes", [1, 5, 40])
def test_a_last_record_cut_short_is_dropped_with_a_word(tmp_path, cut_bytes):
    path = tmp_path / "steps.jsonl"
    whole = short_log(path)
    all_events = len(read_step_log(path).events)
    path.write_bytes(whole[:-cut_bytes])
    read = read_step_log(path)
    assert len(read.events) == all_events - 1
    assert "cut short" in read.warning and str(path) in read.warning
    check_scheduler(replay(read.events))


def test_damage_before_the_end_names_the_line(tmp_path):
    path = tmp_path / "steps.jsonl"
    lines = short_log(path).split(b"\n")
    lines[2] = lines[2][:-4]
    path.write_bytes(b"\n".join(lines))
    read = read_step_log(path)
    assert len(read.events) == 1 and "line 3" in read.warning
    path.write_bytes(b"\n".join([*lines[:1], *lines[2:]]))
    with pytest.raises(StepLogError, match="line 2: .*configuration of an engine is missing"):
        read_step_log(path)


def test_engines_after_a_damaged_one_are_whole(tmp_path):
    path = tmp_path / "steps.jsonl"
    short_log(path)
    first = read_step_log(path)
    short_log(path)
    lines = path.read_bytes().split(b"\n")
    for number in range(2, 2 + len(first.events)):
        path.write_bytes(b"\n".join([*lines[: number - 1], b"{}", *lines[number:]]))
        read = read_step_log(path)
        engine = list(engines_of(read.events))[-1]
        assert encode(engine) == encode(first.events), "the second engine"
        assert read.lines[-len(engine)] == 2 + len(first.events)
        assert f"line {number}: damaged record" in read.warning


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 10**11), ("block_size", 2**31), ("max_num_seqs", 10**9)],
)
def test_sizes_that_no_engine_has_are_damage(tmp_path, field, value):
    path = tmp_path / "steps.jsonl"
    old = re.sub(
        rb'"max_num_batched_tokens":\d+', b'"max_num_batched_tokens":%d' % 2**40, short_log(path)
    )
    path.write_bytes(
        re.sub(rb'"%b":\d+' % field.encode(), b'"%b":%d' % (field.encode(), value), old, count=1)
    )
    with pytest.raises(StepLogError, match=f"line 2: .*{field}"):
        read_step_log(path)


def test_a_replay_names_the_event_that_does_not_follow(tmp_path):
    path = tmp_path / "steps.jsonl"
    short_log(path)
    events = list(read_step_log(path).events)
    planned = next(i for i, event in enumerate(events) if isinstance(event, Planned))
    for at, damaged in (
        (planned, [*events[:planned], *events[planned + 1 :]]),  # lost
        (2, [*events[:2], *events[1:]]),  # an Added is doubled
        (planned + 2, [*events[: planned + 2], *events[planned + 1 :]]),  # a Committed is doubled
    ):
        with pytest.raises(
            StepLogError, match="does not follow from the events before it"
        ) as caught:
            replay(damaged)
        assert caught.value.event == at


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a step log"),
        (b"hello\n", "not a step log"),
        (b'{"format":"cbatch-step-log","version":9}\n', "version 9"),
        (b'{"format":"other","version":1}\n', "other"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    with pytest.raises(StepLogError, match=message):
        read_step_log(path)


def test_replay_wants_the_configuration_first_and_once():
    with pytest.raises(StepLogError, match="first one is not the configuration"):
        replay([])
    configured = Configured(make_config())
    with pytest.raises(StepLogError, match="second Configured"):
        replay([configured, configured])


def test_only_arrays_are_encoded():
    with pytest.raises(NotImplementedError, match="object"):
        encode(object())
