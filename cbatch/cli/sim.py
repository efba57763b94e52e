"""`cbatch sim`: replay a trace through the scheduler on a virtual clock."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cbatch.cli.tracefile import OpenedTrace, add_trace_options, require_place
from cbatch.core.config import LookaheadConfig, SchedulerConfig
from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from sim.costs import CostModel
    from sim.replay import Progress as ReplayProgress
    from sim.report import Objectives, Report, Spread
    from sim.sources import Source

GPU, MODEL_SHAPE = "H100", "llama-3.1-8b"
ACCEPTANCE = 0.7


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sim",
        help="replay a trace through the scheduler on a virtual clock",
        description="The scheduler is the engine's own; what a step takes comes from a cost model.",
    )
    add_trace_options(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, metavar="N", help="the first N only")
    load.add_argument("--rate", type=float, metavar="X", help="times as many requests a second")
    load.add_argument("--concurrency", type=int, metavar="N", help="N clients, stamps ignored")
    load.add_argument("--think", type=float, metavar="SECONDS", help="pause of such a client")
    load.add_argument("--seed", type=int, default=0)
    cost = parser.add_argument_group("cost of a step")
    cost.add_argument("--gpu", metavar="NAME", help=f"roofline of this device (default: {GPU})")
    cost.add_argument(
        "--model", metavar="NAME", help=f"shape or config.json (default: {MODEL_SHAPE})"
    )
    cost.add_argument("--tp", type=int, metavar="N", help="tensor parallel over N devices")
    cost.add_argument("--draft-model", metavar="NAME", help="shape of the draft, as --model")
    cost.add_argument(
        "--step-seconds", type=float, metavar="S", help="instead: every step the same"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--lookahead", default="off", metavar="POLICY", help="off, fixed:4, ...")
    engine.add_argument("--acceptance", type=float, help=f"of a draft (default: {ACCEPTANCE})")
    engine.add_argument("--max-slots", type=int, default=256)
    engine.add_argument("--step-budget", type=int, default=2048, help="tokens of a step, at most")
    engine.add_argument("--block-size", type=int, default=16, help="tokens of a KV block")
    engine.add_argument("--num-blocks", type=int, help="KV blocks (default: what the device holds)")
    engine.add_argument("--max-model-tokens", type=int, help="context (default: the model's)")
    engine.add_argument("--queue-policy", default="fcfs", choices=["fcfs", "priority", "shortest"])
    engine.add_argument("--no-prefix-cache", action="store_true")
    out = parser.add_argument_group("report")
    out.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=S",
        help="ttft, tpot or e2e in seconds, for goodput; repeatable",
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    out.add_argument("--records", type=Path, metavar="FILE", help="write a JSON line a request")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sim.modelled import BernoulliAcceptance, ModelledExecutor
    from sim.replay import replay
    from sim.report import to_json

    _refuse_ignored(args)
    for option, path in (("--json", args.json), ("--records", args.records)):
        if path is not None:
            require_place(option, path)
    trace = OpenedTrace(args, args.seed)
    cost, config, names = _engine(args)
    acceptance = None
    if config.lookahead.policy != "off":
        share = ACCEPTANCE if args.acceptance is None else args.acceptance
        if not 0 <= share <= 1:
            raise FieldError("--acceptance", f"{share} is not allowed", "use a number in [0, 1]")
        acceptance = BernoulliAcceptance(share, max_slots=config.max_slots)
        names["acceptance"] = share
    executor = ModelledExecutor(max_slots=config.max_slots, cost=cost, acceptance=acceptance)
    settings = {"trace": trace.path.name, "format": trace.format, "seed": args.seed} | names
    changes = ("skip_empty", "spread", "requests", "rate", "concurrency", "think")
    settings |= {name: getattr(args, name) for name in changes}
    console = Console(stderr=True)
    with _Bar(console) as bar, _Records(args.records) as records:
        report = replay(
            _source(args, trace),
            config,
            executor,
            seed=args.seed,
            settings=settings,
            objectives=parse_objectives(args.slo),
            on_record=records.write if args.records is not None else None,
            on_progress=bar.update,
        )
    if args.json is not None:
        args.json.write_bytes(to_json(report))
    _print(report)
    return 0


# -- what is run


def _refuse_ignored(args: argparse.Namespace) -> None:
    """Options that the rest of the command line would leave without effect."""
    open_loop, off = args.concurrency is None, args.lookahead == "off"
    constant = args.step_seconds is not None
    for option, given, ignored, why in (
        ("--think", args.think is not None, open_loop, "there are no clients: give --concurrency"),
        ("--rate", args.rate is not None, not open_loop, "--concurrency ignores the stamps"),
        ("--spread", args.spread is not None, not open_loop, "--concurrency ignores the stamps"),
        ("--acceptance", args.acceptance is not None, off, "nobody drafts: give --lookahead"),
        ("--draft-model", args.draft_model is not None, off, "nobody drafts: give --lookahead"),
        ("--gpu", args.gpu is not None, constant, "--step-seconds is the whole cost"),
        ("--model", args.model is not None, constant, "--step-seconds is the whole cost"),
        ("--tp", args.tp is not None, constant, "--step-seconds is the whole cost"),
        ("--draft-model", args.draft_model is not None, constant, "--step-seconds is the cost"),
    ):
        if given and ignored:
            raise FieldError(option, f"would be ignored, since {why}", "leave one of them out")


def _engine(args: argparse.Namespace) -> tuple[CostModel, SchedulerConfig, dict[str, Any]]:
    """The cost model, the scheduler's configuration, and both in words for the report."""
    from cbatch.assembly import lookahead_name, parse_lookahead
    from sim.costs import ConstantCost
    from sim.roofline import Roofline, RooflineConfig, load_gpu, load_shape

    lookahead = parse_lookahead(args.lookahead)
    cost: CostModel
    if args.step_seconds is not None:
        if args.num_blocks is None or args.max_model_tokens is None:
            field = "--num-blocks" if args.num_blocks is None else "--max-model-tokens"
            raise FieldError(field, "is not known with --step-seconds", "give it")
        cost = ConstantCost(step_duration_s=args.step_seconds)
        blocks, context_tokens = args.num_blocks, args.max_model_tokens
        names: dict[str, Any] = {"cost": "constant", "step_duration_s": args.step_seconds}
    else:
        gpu, model, parts = args.gpu or GPU, args.model or MODEL_SHAPE, args.tp or 1
        draft = None if args.draft_model is None else load_shape(args.draft_model)
        if draft is None and lookahead.policy != "off":
            raise FieldError("--draft-model", "is missing", "drafting has a price: name the draft")
        config = RooflineConfig(
            gpu=load_gpu(gpu), shape=load_shape(model), tensor_parallel=parts, draft=draft
        )
        cost = Roofline(config)
        blocks = args.num_blocks or config.num_blocks(args.block_size)
        context_tokens = args.max_model_tokens or config.shape.max_position_embeddings
        names = {"cost": "roofline", "gpu": gpu, "model": model, "tensor_parallel": parts}
        names |= {"draft_model": args.draft_model}
    scheduler = _scheduler(args, lookahead, blocks, context_tokens)
    return cost, scheduler, names | _words(scheduler) | {"lookahead": lookahead_name(lookahead)}


def _scheduler(
    args: argparse.Namespace, lookahead: LookaheadConfig, num_blocks: int, context_tokens: int
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=args.block_size,
        max_slots=args.max_slots,
        max_model_tokens=context_tokens,
        step_budget_tokens=args.step_budget,
        queue_policy=args.queue_policy,
        prefix_cache=not args.no_prefix_cache,
        draft_context_tokens=None if lookahead.policy == "off" else context_tokens,
        lookahead=lookahead,
    )


def _words(config: SchedulerConfig) -> dict[str, Any]:
    fields = (
        "num_blocks",
        "block_size_tokens",
        "max_slots",
        "max_model_tokens",
        "step_budget_tokens",
        "queue_policy",
        "prefix_cache",
    )
    return {field: getattr(config, field) for field in fields}


def _source(args: argparse.Namespace, trace: OpenedTrace) -> Source:
    from sim.sources import ClosedLoop, OpenLoop
    from sim.traces.changes import sample, scale

    requests = trace.requests()
    if args.requests is not None:
        requests = sample(requests, most=args.requests)
    if args.rate is not None:
        requests = scale(requests, rate=args.rate)
    if args.concurrency is None:
        return OpenLoop(requests)
    return ClosedLoop(requests, args.concurrency, think_s=args.think or 0.0)


def parse_objectives(texts: list[str]) -> Objectives | None:
    """Those of `--slo`. Raises `FieldError`."""
    from sim.report import Objectives

    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            given[f"{name}_s"] = seconds = float(value)
        except ValueError:
            seconds = math.nan
        if name not in ("ttft", "tpot", "e2e") or not 0 < seconds < math.inf:
            raise FieldError(
                "--slo", f"{text!r} is not known", "write ttft=0.5, tpot=... or e2e=..."
            )
    return Objectives(**given) if given else None


# -- what is seen


class _Bar:
    """Simulated time and requests, on a terminal alone."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[words]}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, words="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, at: ReplayProgress) -> None:
        words = (
            f"{at.now_s:,.1f} s simulated · {at.finished:,} done · {at.running} running · "
            f"{at.waiting} waiting · {at.steps:,} steps"
        )
        self._progress.update(self._task, words=words)


class _Records:
    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("wb")

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: Any) -> None:
        import msgspec

        assert self._file is not None
        self._file.write(msgspec.json.encode(record) + b"\n")


def _print(report: Report) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{report.settings['trace']}, {report.kind}", title_justify="left")
    for name in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right" if name else "left")
    spreads: tuple[tuple[str, Spread], ...] = (
        ("time to first token, ms", report.ttft_s),
        ("time per output token, ms", report.tpot_s),
        ("between tokens, ms", report.itl_s),
        ("end to end, ms", report.e2e_s),
        ("in the queue, ms", report.queue_s),
    )
    for name, spread in spreads:
        cells = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(name, *("-" if c is None else f"{c * 1e3:,.2f}" for c in cells))
    console.print(table)
    for line in _lines(report):
        console.print(line, soft_wrap=True)
    print(json.dumps(_summary(report)), flush=True)


def _lines(report: Report) -> list[str]:
    running = "" if report.mean_running is None else f", {report.mean_running:.1f} running"
    rate = "" if report.requests_per_s is None else f" ({report.requests_per_s:.3g}/s)"
    lines = [
        f"{report.requests:,} requests{rate} in {report.duration_s:,.1f} s, "
        f"{report.steps:,} steps{running}, {report.preemptions:,} preemptions",
        f"{report.output_tokens:,} output tokens ({report.output_tokens_per_s or 0:,.0f}/s), "
        f"{report.prefix_hit_tokens:,} of {report.prompt_tokens:,} prompt tokens from the cache",
    ]
    if report.speculation is not None and report.speculation.acceptance is not None:
        speculation = report.speculation
        lines.append(
            f"{speculation.acceptance:.1%} of {speculation.drafted_tokens:,} drafts accepted, "
            f"{speculation.tokens_per_step or 0:.2f} tokens a row and step"
        )
    if report.goodput is not None:
        lines.append(
            f"goodput {report.goodput.requests_per_s:.3g} requests/s: "
            f"{report.goodput.share:.1%} of all met their objectives"
        )
    if report.cut_requests:
        lines.append(f"{report.cut_requests:,} outputs cut at the end of context or pool")
    if report.refused:
        first = report.refused[0]
        lines.append(
            f"{len(report.refused):,} refused, the first: request {first.index}: {first.reason}"
        )
    return lines


def _summary(report: Report) -> dict[str, Any]:
    """The last line: the report, with the number of refusals for their list."""
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(report)
    document["refused"] = len(report.refused)
    return document
