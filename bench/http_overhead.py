"""Processor time of `cbatch serve` outside its engine process, per chunk of a stream:
`python -m bench.http_overhead`. The demo target answers without drafts, a token a chunk."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.report import print_report
from bench.stalls import served
from cbatch.cli.parser import CommandParser

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x = 1"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x = 1"}]},
}
_SERVER = "-m cbatch.cli.main serve --port {port} --lookahead off --no-enable-prefix-caching"


def server_cpu_s() -> float:
    """Return the processor seconds of this process's children, without their own children."""
    children = "".join(file.read_text() for file in Path("/proc/self/task").glob("*/children"))
    tasks = [task for pid in children.split() for task in Path("/proc").glob(f"{pid}/task/*")]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(url: str, path: str, num_streams: int, num_tokens: int) -> dict[str, Any]:
    fields = BODIES[path] | {"stream": True, "ignore_eos": True, "max_tokens": num_tokens}
    request = Request(url + path, json.dumps(fields).encode(), {"content-type": "application/json"})

    def read(_: int) -> int:
        with urlopen(request) as answer:
            return sum(line.startswith(b"data: {") for line in answer)

    with ThreadPoolExecutor(num_streams) as threads:
        began_s = server_cpu_s()
        chunks = sum(threads.map(read, range(num_streams)))
        us = (server_cpu_s() - began_s) / chunks * 1e6
    return {
        "path": path,
        "streams": num_streams,
        "chunks": chunks,
        "server_us_per_chunk": round(us, 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each stream")
    arguments = parser.parse_args(argv)
    command = f"{sys.executable} {_SERVER} --max-num-seqs {max(arguments.streams)}"
    with served(command) as server:
        url = f"http://{server.endpoint.host}:{server.endpoint.port}"
        measure(url, "/v1/chat/completions", 1, 8)  # the first call compiles
        rows = [
            measure(url, path, n, arguments.tokens) for path in BODIES for n in arguments.streams
        ]
    print_report("server: processor time per chunk", rows)


if __name__ == "__main__":
    main()
