"""Log probabilities of a step's output rows are computed together, and are those of each row."""

from __future__ import annotations

from itertools import starmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.plan import NO_DELTAS, Deltas, NewSequence, StepPlan
from cbatch.runtime.gpu import logprobs
from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.logprobs import LogprobsReader
from cbatch.runtime.sampling.logprobs import pack, unpack
from triton_kernels.slots import advance as fields

SLOTS, VOCAB = [1, 2, 4, 5], 40
DRAFTS, EMITTED, TOPS, KNOWN = [0, 2, 69, 66], [1, 2, 0, 67], [3, 0, 3, 3], [9, 12, 20, 90]


class CountingDevice(Device):
    fetched = 0

    def fetch(self, source: Tensor, to: Tensor) -> None:
        self.fetched += 1
        super().fetch(source, to)


def plan_of(slots: list[int], drafts: list[int]) -> StepPlan:
    """Return the plan of a decode step."""
    num_drafts, zeros = np.array(drafts, dtype=np.int32), np.zeros(len(slots), dtype=np.int32)
    rows = np.array(slots, dtype=np.int32), zeros, num_drafts + 1, num_drafts, zeros
    return StepPlan(0, *rows, np.ones(len(slots), dtype=np.bool_), NO_DELTAS)


def admission_of(slot: int, num_top: int) -> NewSequence:
    params, ids = SamplingParams(logprobs=num_top), np.zeros(1, dtype=np.int32)
    return NewSequence(slot, 0, str(slot), 0, 0, params, (), ids, 1, 99, 0, 0, ids)


def test_output_rows_are_computed_together(monkeypatch: Any) -> None:
    generator, slots, drafts = torch.Generator().manual_seed(0), SLOTS, DRAFTS
    starts = np.cumsum([0, *(1 + d for d in drafts)])
    logits = torch.randn(int(starts[-1]), VOCAB, generator=generator)
    result = torch.randint(0, VOCAB, (6, fields.NUM_FIELDS + 70), generator=generator).int()
    logit_starts, num_tokens = torch.zeros(2, 6, dtype=torch.int32)
    for slot, emitted, start, known in zip(slots, EMITTED, starts[:-1], KNOWN, strict=True):
        logit_starts[slot], num_tokens[slot] = int(start), known
        result[slot, fields.EMITTED] = emitted
    layout = SimpleNamespace(logit_starts=logit_starts)
    target: Any = SimpleNamespace(
        logits=logits, layout=layout, result=result, max_logits=len(logits)
    )
    state: Any = SimpleNamespace(num_tokens=num_tokens)
    decoder: Any = SimpleNamespace()
    reader, device, sizes = LogprobsReader(decoder, target, state), CountingDevice(), []
    none = NO_DELTAS.released
    admitted = tuple(starmap(admission_of, zip(slots, TOPS, strict=True)))
    reader.apply_deltas(Deltas(False, none, none, admitted, none, none, none))

    def counted(x: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(x))
        return pack(x, *rest)

    monkeypatch.setattr(logprobs, "pack", counted)
    copies = reader.queue(plan_of(slots, drafts), device)
    # Three rows want 3 top tokens, in parts that fit the memory; one wants none.
    assert sizes == [128, 10, 3] and device.fetched == 4
    entries = {entry.slot: entry for entry in reader.describe(copies, result.numpy())}
    assert [*entries] == [1, 2, 5]
    for slot, emitted, start, known, num_top in zip(
        slots, EMITTED, starts, KNOWN, TOPS, strict=False
    ):
        if emitted:
            tokens = result[slot, fields.NUM_FIELDS :][:emitted].long()
            rows = logits[start : start + emitted]
            alone = unpack(slot, known - emitted, pack(rows, tokens, num_top).numpy())
            entry = entries[slot]
            assert entry.first_position == alone.first_position
            for name in ("chosen", "top_ids", "top"):
                assert np.array_equal(getattr(entry, name), getattr(alone, name)), name
