"""Load a server and read the report: `cbatch serve`, then `python examples/load_test.py`."""

import json
import sys
import tempfile
from pathlib import Path

from cbatch.cli.main import main as cbatch


def main(url: str = "http://localhost:8000") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        words = f"bench {url} --concurrency 1,4 --requests 8 --quiet".split()
        lengths = ["--prompt-tokens", "32", "--output-tokens", "8"]
        status = cbatch([*words, *lengths, "--json", str(path)])
        if status:
            raise SystemExit(status)
        document = json.loads(path.read_bytes())
    for clients, report in zip(document["loads"], document["reports"], strict=True):
        tokens, first = report["output_tokens_per_s"], report["ttft_s"]["p50"]
        print(f"{clients:.0f} clients: {tokens:.0f} tokens/s, first token after {first:.3f} s")
        print(f"  {report['sent']} calls, errors: {report['errors']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
