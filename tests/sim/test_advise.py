"""Drafters are rerun over recorded texts; scenarios then do what an engine would have done."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bench.simulator.advice import CpuClock, Offered, compare, offer
from cbatch.cli.main import main
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import TextFinished
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.slot_counts import SlotCounts
from cbatch.core.speculation.build import parse_lookahead
from cbatch.demo import demo_head, demo_paths, demo_prompts, edit_prompts
from cbatch.engine.build import load_core
from cbatch.engine.core import EngineCore
from cbatch.engine.options import EngineOptions
from cbatch.rerun.drafters import Fates, Rerun, rerun
from cbatch.rerun.models import DraftSizes
from cbatch.rerun.prices import recorded_prices, with_drafter
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.lookups import chain_drafter
from cbatch.steplog.recorded_run import RecordedText
from cbatch.steplog.recorder import StepRecorder
from cbatch.steplog.step_log import encode_line
from cbatch.text import load_tokenizer
from sim.advise.recording import Figures, Recording, read_run
from sim.advise.scenarios import RecordedWorld, Row, ScenarioSettings, merged, ranked, search
from sim.advise.speed import RecordedSpeed
from sim.advise.texts import RecordedDrafts
from sim.cost.base import constant_cost
from sim.replay.replay import replay
from sim.report.timeline import TimelineStep
from sim.workload.sources import OpenLoop
from sim.workload.traces.request import TraceRequest
from tests.helpers import World, make_request
from tests.test_llm import write_model

TARGET, DRAFT = demo_paths()
OPTIONS = EngineOptions(
    lookahead="fixed:1", drafter=("model",), num_blocks=1, max_num_seqs=1, tokenizer="none"
)
PRICES = CostProfile(
    2e-3, 1e-4, logit_s=5e-5, context_s=1e-7, draft_pass_s=3e-4, draft_token_s=1e-5, verify_s=2e-4
)
MODELS = {"model": str(TARGET), "draft": str(DRAFT), "options": {"tokenizer": "none"}}
K = 8
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "verification": "coupled"},
    "rejection": {"temperature": 0.8, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def cores() -> Iterator[dict[str, EngineCore]]:
    drafts = {"model": DRAFT, "head": demo_head()}
    cores = {
        name: load_core(TARGET, draft, OPTIONS, handles_text=False)[0]
        for name, draft in drafts.items()
    }
    yield cores
    for core in cores.values():
        core.resources.close()


@pytest.fixture(scope="module")
def core(cores: dict[str, EngineCore]) -> EngineCore:
    return cores["model"]


@dataclass
class Steps:
    """An observer that keeps what each step did."""

    steps: list[Any] = field(default_factory=list)

    def step(self, step: TimelineStep) -> None:
        plan, result = step.plan, step.result
        arrays = plan.slots, plan.query_lens, plan.num_drafts, plan.catch_up
        arrays += result.num_drafted, result.num_accepted, result.tokens
        times_s = step.started_s, step.ended_s
        self.steps.append((*times_s, *(array.tolist() for array in arrays)))


class PricedExecutor:
    """A real executor whose results have the durations of `PRICES`."""

    def __init__(self, executor: TorchExecutor, max_num_seqs: int, speed: RecordedSpeed | None):
        self._executor, self._counts = executor, SlotCounts(max_num_seqs)
        self._speed, self._now_s = speed, 0.0
        self._cost, self.host_s = PRICES, 0.0

    def idle(self, seconds: float) -> None:
        self._now_s += seconds

    def run(self, plan: StepPlan) -> StepResult:
        result, counts = self._executor.run(plan), self._counts
        for admission in plan.deltas.new_sequences:
            counts.admit(admission)
        work = counts.work(plan, result.num_drafted)
        counts.advance(plan, result.num_accepted, np.diff(result.row_splits))
        parts_s, factor = self._cost.step_s(work), 1.0
        if self._speed is not None:
            end_s = self._speed.end_s(self._now_s, sum(parts_s))
            factor = (end_s - self._now_s) / sum(parts_s)
        self._now_s += factor * sum(parts_s)
        draft_s, target_s, self.host_s = (factor * part_s for part_s in parts_s)
        return replace(result, draft_s=draft_s, target_s=target_s)


def config_for(core: EngineCore, lookahead: str, drafter: str | None) -> SchedulerConfig:
    loaded_config = core.scheduler.config
    return replace(
        loaded_config,
        num_blocks=160,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        lookahead=parse_lookahead(lookahead),
        drafter=None if drafter is None else (drafter,),
        draft_context_tokens=loaded_config.draft_context_tokens if drafter == "model" else None,
    )


def requests_for(sampling: str, count: int = 14) -> list[tuple[TraceRequest, Request]]:
    tokenizer = load_tokenizer(TARGET)
    texts = [text for pair in zip(demo_prompts(), edit_prompts(), strict=False) for text in pair]
    requests = []
    for number in range(count):
        prompt = tuple(tokenizer.encode(texts[number % len(texts)]))[-70:]
        params = SamplingParams(max_tokens=12 + 5 * (number % 7), **SAMPLING[sampling])
        request = Request(request_id=str(number), prompt=prompt, params=params, seed=number)
        lengths = {"prompt_tokens": len(prompt), "output_tokens": params.max_tokens}
        requests.append((TraceRequest(arrival_s=0.012 * number, **lengths), request))
    return requests


def executor_for(core: EngineCore, config: SchedulerConfig) -> TorchExecutor:
    sizes = {name: getattr(config, name) for name in ("num_blocks", "block_size", "max_num_seqs")}
    sizes["num_state_pages"] = config.num_state_pages
    names, drafter = config.default_chain, None
    if names and config.lookahead.policy != "off":
        drafter = chain_drafter(config, core.executor.drafter.model if "model" in names else None)
    core.executor.model.keep_hidden(() if drafter is None else drafter.hidden_layers)
    return TorchExecutor(core.executor.model, **sizes, drafter=drafter)


def run(
    core: EngineCore,
    config: SchedulerConfig,
    requests: list[tuple[TraceRequest, Request]],
    log: Any = None,
    speed: RecordedSpeed | None = None,
) -> list[Any]:
    """Serve requests with the real executor, on a virtual clock with `PRICES`."""
    steps = Steps()
    replay(
        OpenLoop(traced for traced, _ in requests),
        config,
        PricedExecutor(executor_for(core, config), config.max_num_seqs, speed),
        make_request=lambda number, _: requests[number][1],
        observers=[steps],
        log=log,
    )
    return steps.steps


def record(
    path: Path, core: EngineCore, sampling: str, lookahead: str, drafter: str | None
) -> Recording:
    config = config_for(core, lookahead, drafter)
    with StepRecorder(path, models=MODELS) as log:
        run(core, config, requests_for(sampling), log)
    return read_run(path)


def fates_of(recording: Recording, drafter: str, core: EngineCore | None = None) -> Rerun:
    return rerun(recording.outputs, recording.engine.config, drafter, K, core)


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ("model", "greedy"),
        ("model", "coupled"),
        ("model", "rejection"),
        ("head", "rejection"),
        ("ngram", "rejection"),
        ("suffix", "greedy"),
    ],
)
def test_fates_of_a_rerun_are_those_recorded(
    tmp_path: Path, cores: dict[str, EngineCore], drafter: str, sampling: str
) -> None:
    """All of them, at a largest k of more than the recorded one. In the log some drafts are
    accepted and some are not, so that a wrong outcome would be noticed."""
    core, name = cores.get(drafter, cores["model"]), "model" if drafter == "head" else drafter
    recording = record(tmp_path / "log", core, sampling, "fixed:4", name)
    fates = fates_of(recording, name, core).fates
    rows = [row for row in recording.drafts if row.drafted]
    assert {0} < {row.accepted for row in rows}
    checked, differing = recording.compare(name, fates, K)
    assert differing == 0 and checked > len(rows) / 2
    wrong = [row._replace(accepted=(row.accepted + 1) % (row.drafted + 1)) for row in rows]
    checked, differing = recording._replace(drafts=wrong).compare(name, fates, K)
    assert differing == checked


def test_a_model_with_recurrent_layers_is_rerun(tmp_path: Path) -> None:
    """By rejection sampling the target's logits are needed: its states are computed again."""
    paths = [write_model(tmp_path / str(kind), hybrid=kind) for kind in ("qwen3_5_text", None)]
    options = replace(OPTIONS, random_weights_seed=0)
    core, _, _ = load_core(*map(str, paths), options, handles_text=False)
    chosen = random.Random(0)
    requests = []
    for number, (traced, request) in enumerate(requests_for("rejection", 6)):
        prompt = tuple(chosen.randrange(1, 60) for _ in range(20 + 7 * number))
        traced = replace(traced, prompt_tokens=len(prompt))
        requests.append((traced, replace(request, prompt=prompt)))
    config = replace(config_for(core, "fixed:4", "model"), num_state_pages=24, state_interval=2)
    with StepRecorder(tmp_path / "log", models=MODELS) as log:
        run(core, config, requests, log)
    recording = read_run(tmp_path / "log")
    fates = fates_of(recording, "model", core).fates
    checked, differing = recording.compare("model", fates, K)
    assert {row.accepted for row in recording.drafts} > {0}
    assert differing == 0 and checked > 20
    core.resources.close()


def world_of(recording: Recording, core: EngineCore) -> RecordedWorld:
    fates = {name: fates_of(recording, name, core).fates for name in ("model", "ngram", "suffix")}
    prices = dict.fromkeys(("off", "model", "ngram", "suffix+ngram", "ngram+model"), PRICES)
    sizes = DraftSizes.of(core)
    return RecordedWorld(recording.engine.config, recording.texts, prices, fates, sizes)


@pytest.mark.parametrize(("draft", "sampling"), [("model", "greedy"), ("head", "coupled")])
def test_a_scenario_is_a_real_run_step_by_step(
    tmp_path: Path, cores: dict[str, EngineCore], draft: str, sampling: str
) -> None:
    core = cores[draft]
    recording = record(tmp_path / "log", core, sampling, "fixed:2", "model")
    world = world_of(recording, core)
    recorded = ScenarioSettings.of(world.config)
    for changes in (
        {},
        {"lookahead": "off", "drafter": None},
        {"lookahead": "fixed:4"},
        {"lookahead": "adaptive:8"},
        {"lookahead": "fixed:6", "drafter": "ngram", "max_num_seqs": 8},
        {"lookahead": "adaptive:8", "drafter": "ngram+model"},
        {"lookahead": "fixed:4", "max_num_batched_tokens": 40, "itl_target_s": 0.0075},
    ):
        settings = recorded._replace(**changes)
        steps = Steps()
        row = world.serve(settings, [steps])
        expected = run(core, world.config_of(settings), requests_for(sampling))
        for number, (simulated, real) in enumerate(zip(steps.steps, expected, strict=False)):
            assert simulated == real, (changes, number)
        assert len(steps.steps) == len(expected)
        assert (row["drafted_tokens"] > 0) == (settings.lookahead != "off"), changes


def test_the_first_of_a_chain_that_has_drafts_makes_them() -> None:
    """The draft model has not read the prompt, and catches up before it drafts."""
    text = RecordedText(make_request("0", 300), 0.0, list(range(9)))
    lookup, model = [0, 0, 3, 3, 0, 0, 0, 0, 0], [4] * 9
    fates = {
        name: {"0": Fates(np.array(drafted), np.array(drafted) // 2)}
        for name, drafted in (("ngram", lookup), ("model", model))
    }
    drafts = RecordedDrafts({"0": text}, ("ngram", "model"), fates, 1, context_tokens=306)
    drafts.admit(SimpleNamespace(slot=0, request_id="0", draft_kv_len_tokens=0))
    outcomes = []
    for position in (1, 2, 3, 4, 5, 6, 7):
        columns = {"slots": [0], "num_drafts": [4], "catch_up": [0]}
        plan = SimpleNamespace(**{name: np.array(column) for name, column in columns.items()})
        drafted = drafts.num_drafted(plan, [300 + position])
        accepted = drafts.num_accepted(plan.slots, np.array([300 + position]), drafted)
        (kv_len,) = drafts.draft_kv_lens(plan, lambda at=position: [300 + at])
        outcomes.append((drafted.item(), accepted.item(), kv_len.item()))
    # At 1 none drafts: the model reads 256 tokens, which is not enough. Its context ends at 306.
    assert outcomes == [
        (0, 0, 256), (3, 1, 256), (3, 1, 256), (3, 2, 304), (2, 2, 305), (1, 1, 306), (0, 0, 306)
    ]  # fmt: skip


def test_prices_fitted_to_a_log_are_those_of_its_steps(tmp_path: Path, core: EngineCore) -> None:
    """Also for other numbers of rows and drafts, if the log has the prices of the start."""
    recording = record(tmp_path / "log", core, "greedy", "fixed:2", "model")
    for start in (None, PRICES):
        prices = recorded_prices(recording.samples, start)
        cost, true = prices, PRICES
        fitted_s, true_s = (
            np.array([sum(each.step_s(s.work)) for s in recording.samples]) for each in (cost, true)
        )
        assert fitted_s.sum() == pytest.approx(true_s.sum(), rel=0.02)
        assert np.median(np.abs(fitted_s / true_s - 1)) < 0.02
    work = StepWork(rows=16, decode_rows=16, target_tokens=16, logit_tokens=16, context_tokens=1600)
    assert sum(cost.step_s(work)) == pytest.approx(sum(true.step_s(work)), rel=0.1)
    slow = [StepSample(s.work, 3 * s.draft_s, 15e-6) for s in recording.samples if s.draft_s]
    other = with_drafter(prices, slow)
    drafting = next(s.work for s in recording.samples if s.work.draft_depth == 2)
    ratio = other.step_s(drafting)[0] / cost.step_s(drafting)[0]
    assert ratio == pytest.approx(3, rel=0.1)


def test_a_recorded_step_takes_its_recorded_time_and_half_of_it_half_the_time() -> None:
    works = [StepWork(rows=n, decode_rows=n, target_tokens=n) for n in (1, 4, 2, 8)]
    spans = [(0.0, 0.01), (0.01, 0.5), (0.7, 0.71), (0.71, 0.71)]  # idle from 0.5 to 0.7
    cost = PRICES
    prices_s = [sum(cost.step_s(work)) for work in works]
    speed = RecordedSpeed(spans, [StepSample(work, 0.0, 0.0) for work in works], cost)
    for (start_s, end_s), price_s in zip(spans[:3], prices_s, strict=False):
        assert speed.end_s(start_s, price_s) == pytest.approx(end_s)
        assert speed.end_s(start_s, price_s / 2) == pytest.approx((start_s + end_s) / 2)
    assert speed.end_s(0.255, prices_s[1]) == pytest.approx(0.5 + prices_s[1] / 2)
    assert speed.end_s(2.0, 0.25) == pytest.approx(2.25)


def test_a_scenario_is_slow_when_the_recorded_machine_was(tmp_path: Path, core: EngineCore) -> None:
    """The machine takes three times as long between 50 and 150 ms."""
    slow = RecordedSpeed([(0.05, 0.15)], [StepSample(StepWork(), 0.0, 0.0)], constant_cost(0.1 / 3))
    config, path = config_for(core, "fixed:2", "model"), tmp_path / "log"
    with StepRecorder(path, models=MODELS) as log:
        run(core, config, requests_for("greedy"), log, slow)
    recording = read_run(path)
    measured, world = recording.figures(), world_of(recording, core)
    speed = RecordedSpeed(recording.spans, recording.samples, PRICES)
    settings = ScenarioSettings.of(world.config)
    row = world._replace(speed=speed).serve(settings)
    assert {name: row[name] for name in measured} == pytest.approx(measured, rel=1e-3)
    assert world.serve(settings)["tokens_per_s"] > 1.1 * row["tokens_per_s"]


class VirtualClock(CpuClock):
    def __call__(self) -> float:
        return self._slept_s


class NoisyExecutor(PricedExecutor):
    """A real executor on a virtual clock, whose steps take 0.7 to 1.4 times `PRICES`."""

    def __init__(self, executor: TorchExecutor, max_num_seqs: int, clock: VirtualClock, seed: int):
        super().__init__(executor, max_num_seqs, None)
        self.check, self.reset = executor.check, executor.reset
        self._clock, self._rng = clock, np.random.default_rng(seed)

    def run(self, plan: StepPlan) -> StepResult:
        result, factor = super().run(plan), float(np.exp(self._rng.normal(0, 0.15)))
        draft_s, target_s = factor * result.draft_s, factor * result.target_s
        self._clock.sleep(draft_s + target_s + factor * self.host_s)
        return replace(result, draft_s=draft_s, target_s=target_s)


@pytest.mark.parametrize("spread", [0.03, 0.006])
def test_advice_is_right_in_reality_or_has_a_warning(
    tmp_path: Path, core: EngineCore, spread: float
) -> None:
    """An engine that is a third as busy as it can be, and one that is too busy. Each run has noise
    of its own. The record alone is simulated exactly."""
    seeds = iter(range(9))

    def serve(settings: ScenarioSettings, requests: Offered, path: Path) -> Figures:
        config = config_for(core, settings.lookahead, settings.drafter)
        sizes = {name: getattr(settings, name) for name in settings._fields[2:]}
        config, clock = replace(config, cost_profile=PRICES, **sizes), VirtualClock()
        executor = executor_for(core, config)
        noisy = NoisyExecutor(executor, config.max_num_seqs, clock, next(seeds))
        with StepRecorder(path, models=MODELS) as log:
            offer(EngineCore(Scheduler(config, log), noisy, clock=clock), clock, requests)
        return read_run(path).figures()

    requests = [(spread * n, each) for n, (_, each) in enumerate(requests_for("greedy", 40))]
    settings = ScenarioSettings("fixed:2", "suffix", 8, 96, None)
    row = compare(serve, settings, requests, tmp_path / "log", "--drafter", "suffix")
    assert abs(row["tokens_per_s own"]) < 1e-3 and abs(row["tpot_p95_s own"]) < 0.01
    assert not row["unmarked"] and not row["worse"], row


def test_the_recorded_policy_keeps_its_parameters(core: EngineCore) -> None:
    config = config_for(core, "adaptive", "model")
    config = replace(config, lookahead=replace(config.lookahead, switch_gain=0.01))
    world = RecordedWorld(config, {}, {"model": PRICES}, {}, DraftSizes.of(core))
    settings = ScenarioSettings.of(config)
    assert world.config_of(settings).lookahead == config.lookahead
    assert world.config_of(settings._replace(lookahead="fixed:4")).lookahead.k == 4


@pytest.mark.parametrize("ended", ["stop string", "cancelled"])
def test_the_machine_is_idle_after_the_last_request_was_ended(tmp_path: Path, ended: str) -> None:
    with StepRecorder(tmp_path / "log") as log:
        world = World(log=log, cost=PRICES)
        world.add(make_request("a", max_tokens=50))
        for _ in range(5):
            world.step()
        if ended == "cancelled":
            world.scheduler.cancel("a", world.clock())
        else:
            world.scheduler.finish("a", 2, world.clock())
        world.clock.advance(10.0)
        world.add(make_request("b", max_tokens=3))
        world.run()
    recording = read_run(tmp_path / "log")
    spans = np.array(recording.spans)
    assert spans[-1, 1] > 10.0 and np.diff(spans).max() < 0.5
    assert max(sample.host_s for sample in recording.samples) < 0.5


ROWS = [
    {"name": name, "tokens_per_s": rate, "tpot_p95_s": gap_s, "ttft_p95_s": 1.0}
    for name, rate, gap_s in (
        ("a", 99.5, 0.01),
        ("b", 100.0, 0.02),
        ("c", 98.0, 0.001),
        ("d", 99.2, 0.0104),
    )
]


def ranks(rows: list[Row], recorded: int) -> str:
    return "".join(row["name"] for row in ranked(rows, rows[recorded]))


def test_the_best_has_no_worse_latencies_and_among_equals_much_shorter_gaps() -> None:
    assert [ranks(ROWS, recorded) for recorded in range(4)] == ["abdc", "abdc", "cbad", "dbac"]
    slow_start = [ROWS[0] | {"ttft_p95_s": 1.1}, *ROWS[1:]]
    assert ranks(slow_start, 1) == "dbac"
    unknown = {"tokens_per_s": None, "tpot_p95_s": None, "ttft_p95_s": None}
    assert ranked([unknown], unknown) == [unknown]


def test_stated_targets_rank_before_tokens() -> None:
    """The goodput decides, then tokens/s and the gaps, whatever was recorded."""
    goods = zip(ROWS, (1.0, 2.0, 3.0, 2.99), strict=True)
    rows = [row | {"goodput_per_s": good} for row, good in goods]
    assert [ranks(rows, recorded) for recorded in range(4)] == ["dcba", "dcba", "dcba", "dcba"]


@pytest.mark.parametrize(("gap_s", "best"), [(0.02, "fixed:4"), (0.03, "off")])
def test_the_best_is_not_worse_in_any_trial(gap_s: float, best: str) -> None:
    recorded = ScenarioSettings("off", None, 4, 96, None)
    choices = {name: [value] for name, value in recorded._asdict().items()}
    choices |= {"lookahead": ["off", "fixed:4"], "drafter": ["suffix"]}

    def row(settings: ScenarioSettings, gap_s: float = 0.02) -> Row:
        rate = 100.0 if settings.lookahead == "off" else 110.0
        figures = {"tokens_per_s": rate, "tpot_p95_s": gap_s, "ttft_p95_s": 1.0}
        return settings._asdict() | figures

    rows = search(recorded, choices, lambda new: map(row, new), lambda best: [row(best, gap_s)])
    assert [row["ratio"] for row in rows] == ([1.1, 1.0] if best == "fixed:4" else [1.0, 1.1])
    assert rows[0]["lookahead"] == best and ("errors" in rows[0]) == (best == "fixed:4")


def test_equal_rows_are_one() -> None:
    settings = [ScenarioSettings("off", None, slots, 96, None)._asdict() for slots in (16, 32, 64)]
    rates = zip(settings, (1.0, 2.0, 2.0), strict=True)
    rows = merged([each | {"tokens_per_s": rate} for each, rate in rates])
    assert [row["max_num_seqs"] for row in rows] == [16, 32]
    assert [row["same"] for row in rows] == [settings[:1], settings[1:]]


def test_a_text_that_a_stop_string_ended_is_cut(tmp_path: Path, core: EngineCore) -> None:
    path = tmp_path / "log"
    whole = record(path, core, "greedy", "off", None)
    with path.open("ab") as file:
        file.write(encode_line(TextFinished("3", 5, 9.0)))
    cut = read_run(path).texts["3"]
    assert cut.cut and cut.output == whole.texts["3"].output[:5]
    assert cut.request.params.max_tokens == 5 and not whole.texts["3"].cut


def test_the_command_prints_plots_and_ends_with_json(
    tmp_path: Path, core: EngineCore, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "log", tmp_path / "page.png"
    record(path, core, "greedy", "fixed:2", "model")
    words = ["advise", str(path), "--processes", "1", "--plot", str(plot), "--itl-target", "0,0.01"]
    words += ["--strict", "--slo", "ttft=1,tpot=0.1", "--slo", "e2e=5"]
    assert main([*words, "--drafter", "ngram", "--max-num-batched-tokens", "96"]) == 0
    out = capsys.readouterr().out
    assert "have the recorded outcome" in out and "goodput/s" in out and "warning" not in out
    document = json.loads(out.splitlines()[-1])
    rows = document["scenarios"]
    assert document["best"] == rows[0] and document["requests"] == 14
    goodputs = [document[name]["goodput_per_s"] for name in ("recorded", "simulated", "best")]
    assert goodputs[1] == pytest.approx(goodputs[0], rel=0.03) and goodputs[2] >= goodputs[1]
    assert document["fates"]["model"]["differing"] == 0 < document["fates"]["model"]["checked"]
    settings = [ScenarioSettings(**each) for row in rows for each in row["same"]]
    tried = {each[:3] for each in settings}
    assert {("off", None, 4), ("fixed:4", "ngram", 4), ("adaptive:8", "model", 4)} <= tried
    assert {each.max_num_seqs for each in settings} == {2, 4, 8}
    assert all(row["drafted_tokens"] == 0 for row in rows if row["lookahead"] == "off")
    assert document["simulated"] in rows and document["simulated"]["ratio"] == 1.0
    assert document["simulated"]["tokens_per_s"] == pytest.approx(
        document["recorded"]["tokens_per_s"], rel=0.03
    )
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_doubtful_figure_is_named_above_the_table(
    tmp_path: Path, core: EngineCore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is slow for a while. At another time this would give other figures."""
    path, config = tmp_path / "log", config_for(core, "off", None)
    slow = RecordedSpeed([(0.05, 0.4)], [StepSample(StepWork(), 0.0, 0.0)], constant_cost(0.1))
    with StepRecorder(path, models=MODELS) as log:
        run(core, config, requests_for("greedy"), log, slow)
    words = ["advise", str(path), "--processes", "1", "--lookahead", "off", "--max-num-seqs", "4"]
    assert [main(words), main([*words, "--strict"])] == [0, 1]
    out = capsys.readouterr().out
    warning, table = out.index("do not trust"), out.index("TPOT p95 ms (?)")
    assert warning < table
    document = json.loads(out.splitlines()[-1])
    assert document["errors"]["tpot_p95_s"] > 0.15 and "tpot_p95_s" in document["doubtful"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "tpot"), "--slo: 'tpot' is not known"),
        (("--drafter", "oracle"), "--drafter: 'oracle' is unknown: use model, ngram, suffix"),
        (("--max-num-seqs", "4,x"), "--max-num-seqs: '4,x' is not a list: write V1,V2"),
        (("--itl-target", "-1"), "--itl-target: '-1': use positive numbers"),
        (("--lookahead", "fixed:99"), "lookahead.k: out of range"),
        (("--draft", "/no/such/draft"), "--draft: /no/such/draft does not exist"),
    ],
)
def test_bad_options_are_named(
    log_of_four: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["advise", str(log_of_four), "--processes", "1", *words]
    if words[0] in ("--lookahead", "--draft", "--slo"):
        assert main(command) == 2
    else:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def log_of_four(tmp_path_factory: pytest.TempPathFactory, core: EngineCore) -> Path:
    path = tmp_path_factory.mktemp("logs") / "log"
    config = config_for(core, "off", None)
    with StepRecorder(path, models=MODELS) as log:
        run(core, config, requests_for("greedy", 4), log)
    return path


def test_logs_without_texts_name_the_remedy(tmp_path: Path, log_of_four: Path) -> None:
    remedy = "cbatch serve --record FILE"
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,1\n")
    with pytest.raises(FieldError, match=f"has no texts.*{remedy}"):
        read_run(trace)
    with pytest.raises(FieldError, match=f"has no texts.*{remedy}"):
        read_run(tmp_path / "missing")
    lines = log_of_four.read_bytes().splitlines(keepends=True)
    simulated = tmp_path / "simulated"
    configured = msgspec.json.decode(lines[1])
    configured["config"]["vocab_size"] = 2**31 - 1
    simulated.write_bytes(lines[0] + msgspec.json.encode(configured) + b"\n" + b"".join(lines[2:]))
    with pytest.raises(FieldError, match="of a simulation"):
        read_run(simulated)
    empty = tmp_path / "empty"
    empty.write_bytes(b"".join(lines[:3]))
    with pytest.raises(FieldError, match=f"no request with output.*{remedy}"):
        read_run(empty)


def test_a_damaged_log_names_the_line_and_a_cut_one_is_used(
    tmp_path: Path, log_of_four: Path
) -> None:
    content = log_of_four.read_bytes()
    lines = content.splitlines(keepends=True)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"".join([*lines[:6], b'{"type":"Planned"}\n', *lines[7:]]))
    assert "line 7: damaged record" in read_run(damaged).warnings[0]
    cut = tmp_path / "cut"
    cut.write_bytes(content[: 2 * len(content) // 3])
    recording = read_run(cut)
    assert "cut short" in recording.warnings[0]
    whole = read_run(log_of_four)
    for name, text in recording.texts.items():
        output = whole.texts[name].output
        assert text.output == output[: len(text.output)]
        assert text.cut == (len(text.output) < len(output))
    assert any(text.cut for text in recording.texts.values())
    assert recording.compare("ngram", fates_of(recording, "ngram").fates, K)[1] == 0
