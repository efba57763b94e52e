"""Output tokens a second through the server beside `LLM.generate`, on the same requests, in turns:
`python -m bench.server`.

`cbatch serve` with its engine runs as users run it; the client is a process of its own that reads
raw sockets and parses nothing but the last chunk of a stream. Its processor time is reported, since
it shares the cores. The ratio is taken within a repeat, of which the order turns round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.engine import Prompts, make_prompts
from bench.report import print_report
from bench.shapes import SHAPES, write_random_model
from cbatch import LLM, SamplingParams
from cbatch.demo import demo_paths

LIMIT = 0.9  # of `LLM.generate`
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Read(NamedTuple):
    seconds: float  # from the first byte sent to the last one received
    tokens: int
    chunks: int
    client_s: float  # of a processor


def stream_all(port: int, prompts: Prompts, output_tokens: int, answer: Connection) -> None:
    """In a process of its own: sends a `Read` once every stream has ended."""
    selector, texts = selectors.DefaultSelector(), {}
    began_cpu_s, began_s, chunks = time.process_time(), time.perf_counter(), 0
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        body["return_token_ids"] = True  # so that a step is a chunk without a tokenizer, too
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + raw)
        selector.register(connection, selectors.EVENT_READ)
        texts[connection] = b""
    while selector.get_map():
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            received = connection.recv(65536)
            chunks += received.count(b"data: {")
            texts[connection] = (texts[connection] + received)[-4096:]
            if not received:
                selector.unregister(connection)
                connection.close()
    seconds = time.perf_counter() - began_s
    found = (re.search(rb'"completion_tokens":(\d+)', text) for text in texts.values())
    tokens = sum(int(match[1]) for match in found if match)
    answer.send(Read(seconds, tokens, chunks, time.process_time() - began_cpu_s))


def read_elsewhere(port: int, prompts: Prompts, output_tokens: int) -> Read:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    client = context.Process(target=stream_all, args=(port, prompts, output_tokens, theirs))
    client.start()
    found: Read = mine.recv()
    client.join()
    if found.tokens != len(prompts) * output_tokens:
        raise RuntimeError(f"{found.tokens} tokens came, {len(prompts) * output_tokens} were due")
    return found


@contextmanager
def serving(model: Path, draft: Path | None, args: Any) -> Iterator[int]:
    """`cbatch serve` on a free port."""
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", str(model), "--port", "0"]
    command += ["--dtype", args.dtype, "--lookahead", args.lookahead, "--max-slots"]
    command += [str(args.streams), "--max-model-tokens", "256", "--no-prefix-cache"]
    command += ["--draft", str(draft)] if draft else []
    command += ["--tokenizer", "none"] if args.shape else []
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            found = ADDRESS.search(line)
            if found:
                yield int(found[1])
                return
        raise RuntimeError("the server did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.wait()


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
                read = read_elsewhere(port, prompts, args.output_tokens)
                if not repeat % 2:
                    alone.append(generate())
                served.append(read)
                ratios.append(read.tokens / read.seconds / alone[-1])
    client = statistics.median(read.client_s / read.seconds for read in served)
    row = {
        "model": args.shape or model.name,
        "streams": args.streams,
        "lookahead": args.lookahead,
        "generate_tokens_per_s": round(statistics.median(alone), 1),
        "served_tokens_per_s": round(
            statistics.median(read.tokens / read.seconds for read in served), 1
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
