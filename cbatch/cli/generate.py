"""`cbatch generate`: complete prompts to JSON lines."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from cbatch.assembly import load_engine
from cbatch.cli.jobs import Job, jobs_of_prompts, read_jobs
from cbatch.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    model_paths,
    sampling_params,
)
from cbatch.cli.progress import ProgressBar
from cbatch.cli.results import ResultFile, prepare_output, result_line
from cbatch.cli.summary import Run, print_json, print_summary
from cbatch.core.errors import FieldError
from cbatch.core.request import SamplingParams
from cbatch.info import EngineInfo
from cbatch.llm import Collector, refused
from cbatch.outputs import Completion, Output
from cbatch.stepwise import Engine

INTERRUPTED = 130  # exit status, as shells report SIGINT

EPILOG = """\
Each prompt becomes one JSON line, written when it is done:
  {"index", "id", "prompt", "params", "seed", "choices": [{"text", "token_ids", ...}], "error"}
A line of a .jsonl input is {"prompt": text or token ids, "id", "priority", and sampling fields};
a line at fault is answered with its error, and the others go on.
The last line printed is {"results": [{"output_tokens_per_s", ...}], "machine", "versions"}.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts to JSON lines",
        description="Complete prompts, many at once, to JSON lines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--model", metavar="DIR", help="model directory (default: the demo pair)")
    parser.add_argument("--input", type=Path, metavar="FILE", help=".jsonl, or a prompt a line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted --output")
    parser.add_argument("--no-progress", action="store_true")
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options, defaults = engine_options(args), sampling_params(args)
    jobs = _jobs(args, defaults)
    if args.resume and args.output is None:
        raise FieldError("--resume", "needs a file to continue", "name it with --output")
    done: set[int] = set()
    if args.output is not None:
        done = prepare_output(args.output, jobs, resume=args.resume)
    todo = [job for job in jobs if job.index not in done]
    # Without an output file standard output carries results: what is for people goes elsewhere.
    console = Console(stderr=args.output is None)
    if done:
        console.print(f"{len(done)} of {len(jobs)} prompts are answered already")
    if not todo:
        return 0
    engine, info = load_engine(*model_paths(args.model, args.draft), options)
    for line in info.lines():
        console.print(line, highlight=False, soft_wrap=True)
    return _complete(args, options.max_slots, engine, info, todo, console)


def _jobs(args: argparse.Namespace, defaults: SamplingParams) -> list[Job]:
    if bool(args.prompts) == (args.input is not None):
        raise FieldError("PROMPT", "give prompts or --input", "one of the two")
    return (
        read_jobs(args.input, defaults) if args.input else jobs_of_prompts(args.prompts, defaults)
    )


def _complete(
    args: argparse.Namespace,
    max_slots: int,
    engine: Engine,
    info: EngineInfo,
    jobs: list[Job],
    console: Console,
) -> int:
    batch = _Batch(engine, jobs)
    started_s = time.perf_counter()
    total = sum(job.params.n for job in jobs)
    try:
        with (
            ResultFile(args.output, sys.stdout) as results,
            ProgressBar(total, shown=not args.no_progress) as bar,
        ):
            for job, completion in batch.queue():
                results.write(result_line(job, completion))
            while batch.has_work:
                outputs = engine.step()
                for job, completion in batch.take(outputs):
                    results.write(result_line(job, completion))
                bar.update(outputs)
    except KeyboardInterrupt:
        console.print(f"interrupted: {batch.num_done} of {len(jobs)} prompts are done", style="red")
        if args.output is not None:
            console.print("continue with the same command and --resume")
        return INTERRUPTED
    summary = Run(
        info=info,
        stats=engine.stats,
        batch=min(total, max_slots),
        num_requests=len(jobs),
        num_errors=batch.num_errors,
        elapsed_s=time.perf_counter() - started_s,
    )
    print_summary(summary, console)
    print_json([summary], Console())
    return 0


class _Batch:
    """Jobs in the engine, and which of them are done."""

    def __init__(self, engine: Engine, jobs: list[Job]) -> None:
        self._engine = engine
        self._todo = jobs
        self._running: dict[str, Job] = {}
        self._collector = Collector()
        self.num_done = 0
        self.num_errors = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def queue(self) -> list[tuple[Job, Completion]]:
        """Hands every job to the engine; the refused ones are answered at once."""
        answers = []
        for job in self._todo:
            try:
                if job.error is not None:
                    answers.append((job, Completion("", (), None, error=job.error)))
                    continue
                accepted = self._engine.add(job.prompt, job.params, priority=job.priority)
            except FieldError as error:
                answers.append((job, refused(job.prompt, error)))
            else:
                self._running[accepted.request_id] = job
                self._collector.expect(accepted)
        return self._count(answers)

    def take(self, outputs: list[Output]) -> list[tuple[Job, Completion]]:
        completed = self._collector.take(outputs)
        return self._count([(self._running.pop(c.request_id), c) for c in completed])

    def _count(self, answers: list[tuple[Job, Completion]]) -> list[tuple[Job, Completion]]:
        self.num_done += len(answers)
        self.num_errors += sum(completion.error is not None for _, completion in answers)
        return answers
