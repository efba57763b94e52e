"""Cells: measurements in sequence, the file with a row for each, and the machine."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cbatch.system.machine import describe_machine, describe_versions

Row = dict[str, Any]
FILE = "results.json"
FAULT_EXIT = 70  # exit status of a process that lost the device; another process can continue
NOT_REACHED, NOT_FINISHED = "not reached", "not finished: its process ended"
_FAULTS = ("CUDA error", "Triton Error [CUDA]", "misaligned address", "AcceleratorError")


class NotAvailable(Exception):  # noqa: N818 - it is no error of the run
    """The subject of a cell cannot run here, or not on its inputs."""


class Cell(NamedTuple):
    """A measurement. `labels` describe it; `run` measures and returns the figures."""

    key: str
    labels: Row
    run: Callable[[], Row]


class Bench:
    """A run: its device, and its rows in one file, which is replaced after every change. One
    process writes at a time."""

    def __init__(self, out: Path, peers: Path | None = None) -> None:
        out, self.peers = out.resolve(), peers  # `peers` is the folder with the package vllm
        self.out = out
        self.full = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.full else "cpu")
        self.about: Row = {}  # facts about the machine
        self.rows: list[Row] = []
        if (out / FILE).exists():
            self.about, self.rows = json.loads((out / FILE).read_text(encoding="utf-8")).values()

    @property
    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.full else 0

    def of(self, section: str) -> dict[str, Row]:
        return {row["cell"]: row for row in self.rows if row["section"] == section}

    def save(self, section: str, rows: dict[str, Row]) -> None:
        new = {(section, cell): {"section": section, "cell": cell} | rows[cell] for cell in rows}
        known = {(row["section"], row["cell"]): row for row in self.rows}
        self.rows = list((known | new).values())
        document = json.dumps({"about": self.about, "rows": self.rows}, indent=0, default=str)
        part = (self.out / FILE).with_suffix(".part")
        part.write_text(document + "\n", encoding="utf-8")
        os.replace(part, self.out / FILE)

    def measure(self, section: str, cells: Iterable[Cell]) -> None:
        """Run the cells that no process has begun. A failed cell has the error in its row. Raises
        SystemExit(FAULT_EXIT) once the device is lost."""
        done = self.of(section)
        new = [c for c in cells if done.get(c.key, {}).get("status", NOT_REACHED) == NOT_REACHED]
        self.save(section, {cell.key: cell.labels | {"status": NOT_REACHED} for cell in new})
        for cell in new:
            self.save(section, {cell.key: cell.labels | {"status": NOT_FINISHED}})
            began_s, fault = time.time(), ""
            try:
                row = {"status": "ok"} | cell.run() | {"at_s": [began_s, time.time()]}
            except NotAvailable as reason:
                row = {"status": f"skipped: {reason}"}
            except Exception as error:
                fault = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                row = {"status": f"failed: {fault}"}
            self.save(section, {cell.key: cell.labels | row})
            if "out of memory" not in fault and any(sign in fault for sign in _FAULTS):
                raise SystemExit(FAULT_EXIT)

    def describe(self) -> Row:
        """Return device, driver, versions, date and commit, which must be quoted with figures."""
        facts: Row = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": _output("git", "rev-parse", "HEAD"),
            "uncommitted_changes": bool(_output("git", "status", "--porcelain")),
            "device": None,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
            "machine": describe_machine(),
            "versions": describe_versions(),
        }
        if self.full:
            device = torch.cuda.get_device_properties(self.device)
            facts |= {"device": device.name, "multiprocessors": device.multi_processor_count}
            facts |= {"l2_bytes": self.l2_bytes, "memory_bytes": device.total_memory}
        return facts


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]
