"""The machine of a run, and what its sections share."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu.cells import Results, Row
from cbatch.system.machine import describe_machine, describe_versions


class Bench(NamedTuple):
    """The common context of all sections."""

    device: torch.device
    out: Path
    results: Results
    peers: Path | None = None  # folder with the package vllm

    @classmethod
    def open(cls, out: Path, peers: Path | None = None) -> Bench:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(device, out, Results(out), peers)

    @property
    def full(self) -> bool:
        return self.device.type == "cuda"

    @property
    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.full else 0


def describe(bench: Bench) -> Row:
    """Return device, driver, versions, date and commit, which must be quoted with every figure."""
    facts: Row = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_output("git", "status", "--porcelain")),
        "device": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    if bench.full:
        properties = torch.cuda.get_device_properties(bench.device)
        facts["device"], facts["multiprocessors"] = (
            properties.name,
            properties.multi_processor_count,
        )
        facts["l2_bytes"], facts["memory_bytes"] = bench.l2_bytes, properties.total_memory
        query = "--query-gpu=driver_version", "--format=csv,noheader"
        facts["driver"] = _output("nvidia-smi", *query)
    return facts


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]
