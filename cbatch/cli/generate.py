"""`cbatch generate`: complete prompts, and write one JSON line per prompt."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from cbatch import Engine, EngineInfo
from cbatch.cli.console import TextConsole
from cbatch.cli.jobs import (
    Job,
    ResultFile,
    ResultStream,
    jobs_of_prompts,
    open_results,
    read_jobs,
    result_line,
)
from cbatch.cli.options import MODEL_HELP, add_engine_flags, model_paths
from cbatch.cli.output import INTERRUPTED, add_json_option
from cbatch.cli.settings import add_flags, read_settings
from cbatch.cli.summary import BatchRun, print_results, print_summary
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.engine.build import load_engine
from cbatch.engine.options import EngineOptions, EngineSettings
from cbatch.engine.progress import ProgressBar
from cbatch.llm import Batch
from cbatch.text.outputs import Completion

EPILOG = """\
Each prompt becomes one JSON line, written when it is done:
  {"index", "id", "prompt", "params", "seed", "choices": [{"text", "token_ids", ...}], "error"}
A line of a .jsonl input is {"prompt": text or token ids, "id", "priority", and sampling fields},
which override the options. "priority" needs --scheduling-policy priority. An invalid line gets a
result with "error"; other lines still run.
The last line has figures: {"results": [{"output_tokens_per_s", ...}], "machine", "versions"}.
"""
SAMPLING = {"max_tokens": 64, "temperature": 0.0}  # this command's own defaults


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        usage="%(prog)s [PROMPT ...] [options]",
        description="Complete many prompts at once and write JSON lines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument(
        *("-p", "--prompt"),
        dest="more_prompts",
        action="append",
        default=[],
        metavar="PROMPT",
        help="one more prompt; repeatable",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--input", type=Path, metavar="FILE", help="file of prompts: .jsonl, or one prompt per line"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file for results (default: standard output)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted run that wrote to --output"
    )
    parser.add_argument("--no-progress", action="store_true")
    add_json_option(parser)
    add_flags(parser, SamplingParams, defaults=SAMPLING)
    add_engine_flags(parser, EngineSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(EngineSettings, args)
    options = msgspec.structs.replace(settings.values.engine, generation_config="none")
    jobs = _jobs(args, read_settings(SamplingParams, args, defaults=SAMPLING).values)
    # Messages go to standard error if results go to standard output.
    console = TextConsole(stderr=args.output is None)
    with open_results(args.output, jobs, resume=args.resume) as results:
        remaining = [job for job in jobs if job.index not in results.done]
        if args.resume:
            failed = f", {results.num_failed} failed and will rerun" if results.num_failed else ""
            num_done = len(results.done)
            console.print(f"{num_done} of {len(jobs)} prompts are answered already{failed}")
        if not remaining:
            return 0
        with settings.naming():
            engine, info = load_engine(*model_paths(args.model, settings.values.draft), options)
        for line in info.lines():
            console.print(line, soft_wrap=True)
        return _complete(args, options, engine, info, remaining, results, console)


def _jobs(args: argparse.Namespace, defaults: SamplingParams) -> list[Job]:
    prompts = args.prompts + args.more_prompts
    if bool(prompts) == (args.input is not None):
        raise FieldError("PROMPT", "needs prompts or --input", "give one of the two")
    return read_jobs(args.input, defaults) if args.input else jobs_of_prompts(prompts, defaults)


def _complete(
    args: argparse.Namespace,
    options: EngineOptions,
    engine: Engine,
    info: EngineInfo,
    jobs: list[Job],
    results: ResultFile | ResultStream,
    console: TextConsole,
) -> int:
    batch: Batch[Job] = Batch(engine)
    started_s = time.perf_counter()
    total, num_done, num_errors = sum(job.params.n for job in jobs), 0, 0
    try:
        with ProgressBar(total, shown=not args.no_progress) as bar:
            rejections = ((job, _queue(batch, job, options.seed)) for job in jobs)
            done = [(job, rejection) for job, rejection in rejections if rejection is not None]
            while done or batch.waiting:
                for job, completion in done:
                    results.write(result_line(job, completion))
                    num_done, num_errors = num_done + 1, num_errors + (completion.error is not None)
                outputs = engine.step() if batch.waiting else []
                done = batch.take(outputs)
                bar.update(outputs)
    except KeyboardInterrupt:
        console.print(f"interrupted: {num_done} of {len(jobs)} prompts are done", style="red")
        if args.output is not None:
            console.print("continue with the same command and --resume")
        return INTERRUPTED
    summary = BatchRun(
        info=info,
        stats=engine.stats,
        batch=min(total, options.max_num_seqs),
        num_requests=len(jobs),
        num_errors=num_errors,
        elapsed_s=time.perf_counter() - started_s,
    )
    print_summary(summary, console)
    print_results([summary], args.json)
    return 0


def _queue(batch: Batch[Job], job: Job, engine_seed: int | None) -> Completion | None:
    if job.error is not None:
        return Completion("", (), None, error=job.error)
    return batch.add(job, job.prompt, job.seeded_params(engine_seed), priority=job.priority)
