"""Output tokens a second through the server beside `LLM.generate`, on the same requests, in turns:
`python -m bench.server`.

`cbatch serve` with its engine runs as users run it; the client is a process of its own that reads
raw sockets and parses nothing but the last chunk of a stream. Its processor time is reported, since
it shares the cores. The ratio is taken within a repeat, of which the order turns round.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine import Prompts, make_prompts
from bench.report import print_report
from bench.shapes import SHAPES, write_random_model
from bench.streams import elsewhere, read_streams
from cbatch import LLM, SamplingParams
from cbatch.demo import demo_paths

LIMIT = 0.9  # of `LLM.generate`
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Read(NamedTuple):
    seconds: float  # from the first byte sent to the last one received
    tokens: int
    chunks: int
    client_s: float  # of a processor


def read(port: int, prompts: Prompts, output_tokens: int) -> Read:
    """For a process of its own."""
    body = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    # Token ids, so that a step is a chunk without a tokenizer, too.
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    ends = [b""] * len(prompts)

    def note(place: int, received: bytes) -> None:
        ends[place] = (ends[place] + received)[-4096:]

    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    bodies = [body | {"prompt": prompt} for prompt in prompts]
    chunks = read_streams(port, "/v1/completions", bodies, note)
    seconds = time.perf_counter() - began_s
    found = (re.search(rb'"completion_tokens":(\d+)', text) for text in ends)
    tokens = sum(int(match[1]) for match in found if match)
    return Read(seconds, tokens, chunks, time.process_time() - began_cpu_s)


def read_elsewhere(port: int, prompts: Prompts, output_tokens: int) -> Read:
    found: Read = elsewhere(read, port, prompts, output_tokens)
    if found.tokens != len(prompts) * output_tokens:
        raise RuntimeError(f"{found.tokens} tokens came, {len(prompts) * output_tokens} were due")
    return found


@contextmanager
def started(words: Sequence[str], more: Mapping[str, str] | None = None) -> Iterator[int]:
    """`cbatch serve` on a free port, in an environment that has `more`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli.main", "serve", *words, "--port", "0"],
        env=os.environ | dict(more or {}),
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            found = ADDRESS.search(line)
            if found:
                # What it says from now on must go somewhere, or it waits until somebody reads.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield int(found[1])
                return
        raise RuntimeError("the server did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.wait()


def serving(model: Path, draft: Path | None, args: Any) -> AbstractContextManager[int]:
    words = [str(model), "--dtype", args.dtype, "--lookahead", args.lookahead, "--max-slots"]
    words += [str(args.streams), "--max-model-tokens", "256", "--no-prefix-cache"]
    words += ["--draft", str(draft)] if draft else []
    words += ["--tokenizer", "none"] if args.shape else []
    return started(words)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights (default: demo)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lookahead", default="off")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            model, draft = write_random_model(args.shape, Path(folder), args.dtype), None
        else:
            model, draft = demo_paths()
        draft = None if args.lookahead == "off" else draft
        prompts = make_prompts(model, args.prompt_tokens, args.streams, real=not args.shape)
        llm = LLM(
            model,
            draft,
            dtype=args.dtype,
            lookahead=args.lookahead,
            max_slots=args.streams,
            max_model_tokens=256,
            prefix_cache=False,
            tokenizer="none",
        )
        params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True)
        total = args.streams * args.output_tokens

        def generate() -> float:
            started_s = time.perf_counter()
            llm.generate(prompts, params)
            return total / (time.perf_counter() - started_s)

        with serving(model, draft, args) as port:
            read_elsewhere(port, prompts, args.output_tokens)
            generate()
            alone, served, ratios = [], [], []
            for repeat in range(args.repeats):
                if repeat % 2:
                    alone.append(generate())
                found = read_elsewhere(port, prompts, args.output_tokens)
                if not repeat % 2:
                    alone.append(generate())
                served.append(found)
                ratios.append(found.tokens / found.seconds / alone[-1])
    client = statistics.median(each.client_s / each.seconds for each in served)
    row = {
        "model": args.shape or model.name,
        "streams": args.streams,
        "lookahead": args.lookahead,
        "generate_tokens_per_s": round(statistics.median(alone), 1),
        "served_tokens_per_s": round(
            statistics.median(each.tokens / each.seconds for each in served), 1
        ),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "limit": LIMIT,
        "chunks": served[-1].chunks,
        "client_share_of_a_core": round(client, 3),
    }
    print_report(
        f"served beside LLM.generate: {args.prompt_tokens} tokens in, {args.output_tokens} out",
        [row],
        notes=(f"medians of {args.repeats} repeats in turns; ratios within a repeat",),
    )


if __name__ == "__main__":
    main()
