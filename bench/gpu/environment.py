"""The environment of a run: with a GPU, with the interpreter on a CPU, or without both."""

from __future__ import annotations

import enum
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton import knobs

from cbatch.system.machine import describe_machine, describe_versions


class RunMode(enum.Enum):
    """The use of kernels in this run."""

    DEVICE = "device"  # compiled kernels, full-size inputs, timed
    INTERPRETED = "interpreted"  # TRITON_INTERPRET=1: tiny inputs, one run, no timing
    LISTED = "listed"  # neither: tiny inputs, but no Triton kernel is launched

    @property
    def runs(self) -> bool:
        """True if kernels run, timed or not."""
        return self is not RunMode.LISTED


class Bench(NamedTuple):
    """The common context of all sections."""

    mode: RunMode
    device: torch.device
    out: Path  # folder with the journals of all parts
    peers: Path | None = None  # folder with the package vllm, unpacked
    listing: bool = False  # launches only list their kernels, for compilation

    @property
    def full(self) -> bool:
        return self.mode is RunMode.DEVICE


def find_mode() -> RunMode:
    """Return INTERPRETED if the environment selects it, else DEVICE if there is a GPU."""
    if knobs.runtime.interpret:
        from triton_kernels.build import interpreter

        interpreter.repair()
        return RunMode.INTERPRETED
    return RunMode.DEVICE if torch.cuda.is_available() else RunMode.LISTED


def device_of(mode: RunMode) -> torch.device:
    return torch.device("cuda" if mode is RunMode.DEVICE else "cpu")


def describe(mode: RunMode) -> dict[str, Any]:
    """Return device, driver, versions, date and commit, which must be quoted with every figure."""
    changes = _output("git", "status", "--porcelain")
    facts: dict[str, Any] = {
        "world": mode.value,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "device": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    if mode is RunMode.DEVICE:
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = properties.name
        facts["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
        facts["multiprocessors"] = properties.multi_processor_count
        facts["l2_bytes"] = properties.L2_cache_size
        facts["memory_bytes"] = properties.total_memory
    return facts


def l2_bytes(device: torch.device) -> int:
    return (
        0 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).L2_cache_size)
    )


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
