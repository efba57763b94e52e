"""The kernels that a step launches and the time of each, from torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS, STEP_KERNELS = "steps", "kernels of a step"  # values of `what` in rows of an engine
_MOST, _NAME_CHARS = 40, 90  # most kernels in a list, and characters of their names


def step_kernels(step: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Return kernels by total time, longest first, with calls and microseconds per step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    totals: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:_NAME_CHARS]
            calls, us = totals.get(name, (0, 0.0))
            totals[name] = calls + 1, us + event.time_range.elapsed_us()
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:_MOST]
    return [
        {"kernel": name, "calls": round(calls / steps, 2), "us": round(us / steps, 2)}
        for name, (calls, us) in longest
    ]
