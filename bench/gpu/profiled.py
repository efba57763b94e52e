"""Kernels that a step launches and the time of each, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS, STEP_KERNELS = "steps", "kernels of a step"  # what rows of an engine say
_MOST, _NAME_CHARS = 40, 90


def step_kernels(step: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Kernels by the time that they take, longest first: calls and microseconds a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    totals: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:_NAME_CHARS]
            calls, us = totals.get(name, (0, 0.0))
            totals[name] = calls + 1, us + event.time_range.elapsed_us()
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:_MOST]
    return [
        {"kernel": name, "calls": round(calls / steps, 2), "us": round(us / steps, 2)}
        for name, (calls, us) in longest
    ]
