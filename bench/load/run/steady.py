"""The steady window of a run, saturation of an open loop, and the number of calls in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bench.load.client.call import TimedCall
from bench.load.run.report import Steady
from sim.report.report import Spread

MIN_CALLS = 20  # minimum of calls in a window; with fewer there is no window.
SATURATED_SHARE = 0.1  # an open loop is saturated if more of its calls outlast the window
START_SHARE = 0.1  # share of an open loop's span that is left out: the server starts empty


def steady_of(calls: Sequence[TimedCall], open_loop: bool, ramp_s: float) -> Steady | None:
    """Return the figures of the window from the end of the ramp to the last scheduled send, after
    which the load decreases. None if the window has fewer than `MIN_CALLS` calls or no
    success."""
    if not calls:
        return None
    sends_s = np.array([call.scheduled_s for call in calls])
    end_s = float(sends_s.max())
    start_s = float(sends_s.min()) + ramp_s
    if open_loop:
        start_s = max(start_s, float(sends_s.min()) + START_SHARE * (end_s - float(sends_s.min())))
    else:
        # Clients that start together also end together; from the second call on they are spread.
        firsts = [call.end_s for call in calls if call.scheduled_s <= start_s]
        start_s = max([start_s, *firsts]) if firsts else start_s
    inside = [call for call in calls if start_s <= call.scheduled_s < end_s]
    good = [call for call in inside if call.error is None]
    if len(inside) < MIN_CALLS or not good:
        return None
    span_s = end_s - start_s
    succeeded = [call for call in calls if call.error is None]
    return Steady(
        start_s=start_s,
        end_s=end_s,
        requests_per_s=sum(start_s <= call.end_s < end_s for call in succeeded) / span_s,
        output_tokens_per_s=_tokens_between(succeeded, start_s, end_s) / span_s,
        ttft_s=Spread.of(np.array([call.ttft_s for call in good])),
        tpot_s=Spread.of(np.array([t for call in good if (t := call.tpot_s) is not None])),
        e2e_s=Spread.of(np.array([call.e2e_s for call in good])),
    )


def is_saturated(calls: Sequence[TimedCall], steady: Steady) -> bool:
    """Return whether calls of an open loop piled up in the window.

    Fewer calls must have ended than were scheduled, by more than the share `SATURATED_SHARE` and by
    more than 3 standard deviations of a Poisson count."""
    window = steady.start_s, steady.end_s
    sent = sum(window[0] <= call.scheduled_s < window[1] for call in calls)
    ended = sum(window[0] <= call.end_s < window[1] for call in calls)
    return sent - ended > max(SATURATED_SHARE * sent, 3 * math.sqrt(sent))


def in_flight(runs: Sequence[Sequence[TimedCall]], duration_s: float) -> tuple[float | None, int]:
    """Return the mean number of calls in flight over the runs, and the exact peak. A call that ends
    at the time when another is sent does not overlap it."""
    peak, busy_s = 0, 0.0
    for calls in runs:
        times_s = np.array([(c.sent_s, c.end_s) for c in calls]).reshape(-1, 2)
        busy_s += float((times_s[:, 1] - times_s[:, 0]).sum())
        stamps_s = np.concatenate([times_s[:, 1], times_s[:, 0]])
        steps = np.repeat([-1, 1], len(times_s))
        order = np.argsort(stamps_s, kind="stable")  # an end comes before a send at the same time
        peak = max(peak, int(np.cumsum(steps[order]).max(initial=0)))
    return (busy_s / duration_s if duration_s > 0 else None), peak


def _tokens_between(calls: Sequence[TimedCall], start_s: float, end_s: float) -> int:
    total = 0
    for call in calls:
        if not call.chunk_s:
            total += call.output_tokens * (start_s <= call.end_s < end_s)
            continue
        stamps_s = np.asarray(call.chunk_s)
        inside = (start_s <= stamps_s) & (stamps_s < end_s)
        total += int(np.asarray(call.tokens_by_read())[inside].sum())
    return total
