"""`cbatch check`: is a server lossless? Its answers are compared with each other."""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
import time
from importlib import resources
from pathlib import Path

import msgspec
from rich.table import Table

from bench.load.check import answers, distribution, equality
from bench.load.check.run import FOUND, Check, Result, run_check
from bench.load.check.server import TestedServer
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.drive import event_loop_runner
from bench.load.run.sweep import find_model
from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option, print_figures, require_place
from cbatch.core.request.errors import FieldError

ROOMS = (equality, distribution, answers)
CHECKS: dict[str, Check] = {each.name: each for room in ROOMS for each in room.CHECKS}
FAILED_CHECK = 1  # exit status if something was found
COLUMNS = ("check", "state", "trials", "what", "seen")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>{style}
td, th {{ text-align: left; vertical-align: top; }} td:nth-child(n + 4) {{ white-space: pre-line; }}
.found td:nth-child(2) {{ color: var(--run1); font-weight: 600; }} .not td {{ color: var(--soft); }}
</style><header><h1>{title}</h1><p id="subtitle">{note}</p></header>
<main id="figures" class="card"><table><thead><tr><th>{head}</thead>{rows}</table></main></html>
"""
NOTE = """\
A check that passed saw no deviation in its trials; it proves nothing about other requests. A near
tie is a greedy token that changes between two of nearly equal probability, as rounding does. It
does not change the exit status, which is 1 if something was found.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        description="Check whether the answers of a server of the OpenAI API are consistent.",
        epilog=NOTE + "\nChecks: " + ", ".join(CHECKS),
    )
    parser.add_argument("url", metavar="URL", help="the server, as http://localhost:8000")
    parser.add_argument("--model", help="its model (default: the first that it lists)")
    parser.add_argument("--against", metavar="URL", help="a second server that answers the same")
    parser.add_argument("--minutes", type=float, default=5.0, help="time for all checks (5)")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help="checks by name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial (0)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a call (120)")
    parser.add_argument("--api-key", help="key of the servers (default: CBATCH_API_KEY)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page")
    add_json_option(parser, "results and evidence")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.minutes > 0:
        raise FieldError("--minutes", f"{args.minutes:g} is not a time", "give a positive number")
    require_place("--json", args.json)
    require_place("--page", args.page)
    results: list[Result] = event_loop_runner()(_run(args))
    _show(f"Checks of {args.url}", results, args.page)
    document = {"url": args.url, "seed": args.seed, "results": msgspec.to_builtins(results)}
    print_figures(document, args.json)
    return FAILED_CHECK if any(each.state == FOUND for each in results) else 0


async def _run(args: argparse.Namespace) -> list[Result]:
    # The check with the largest share comes last: it gets what the others left.
    checks = sorted((CHECKS[name] for name in args.only or CHECKS), key=lambda check: check.share)
    key, urls = args.api_key or os.environ.get("CBATCH_API_KEY"), [args.url, args.against]
    clients = [HttpClient(Endpoint.of(u), key=key, timeout_s=args.timeout) for u in urls if u]
    servers = [TestedServer(c, args.model or await find_model(c)) for c in clients]
    end_s, results = time.monotonic() + 60 * args.minutes, []
    for at, check in enumerate(checks):
        print(f"{at + 1}/{len(checks)} {check.name}", file=sys.stderr, flush=True)
        share = check.share / sum(each.share for each in checks[at:])
        seconds = (end_s - time.monotonic()) * share
        results.append(await run_check(check, servers, seed=args.seed, seconds=seconds))
    for client in clients:
        client.close()
    return results


def _show(title: str, results: list[Result], page: Path | None) -> None:
    """Print a table and the findings, and write the HTML page."""
    console, table, rows, evidence = TextConsole(), Table(*COLUMNS, title=title), "", ""
    for result in results:
        lines, cells = [], [result.name, result.state, str(result.trials), result.what]
        for finding in result.findings:
            again = f"again: --only {result.name} --seed {finding['seed']}"
            lines.append(f"{finding['problem']} ({again})")
            request = json.dumps(finding["request"])[:400]
            evidence += f"{result.name}: {lines[-1]}\n    request: {request}\n"
        table.add_row(*cells, result.seen[:80])
        cells = [html.escape(cell) for cell in (*cells, "\n".join([result.seen, *lines]))]
        rows += f"<tr class={result.state.split()[0]}><td>" + "<td>".join(cells)
    console.print(table)
    console.print(evidence, end="")
    if page:
        style = resources.files("sim.report.page").joinpath("page.css").read_text(encoding="utf-8")
        title, head = html.escape(title), "<th>".join(COLUMNS)
        text = PAGE.format(title=title, style=style, note=html.escape(NOTE), head=head, rows=rows)
        page.write_text(text, encoding="utf-8")
