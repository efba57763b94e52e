"""References in place of the kernels of a decoder and of the verdict, each as one operation of a
stream. Only the bookkeeping of a step then remains to be interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.gpu import attention as attend
from cbatch.runtime.gpu import decoder, heads, modelling
from cbatch.runtime.gpu import draft_pass as drafting
from cbatch.runtime.gpu import target_pass as verifying
from tests.gpu_proofs.interpreted.stream import Stream, as_queued
from tests.gpu_proofs.interpreted.light import use_reference_verdicts, use_references
from triton_kernels.verification.kernel import VerifyOutput


def _nothing(*_: object, **__: object) -> None:
    return None


def _halves(gate_up: Tensor, **_: object) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


def _verdict(batch: Any, starts: Tensor, *_: object, **__: object) -> VerifyOutput:
    return VerifyOutput(*(torch.empty_like(starts) for _ in VerifyOutput._fields))


Call = Callable[..., Any]


def use_queued_references(
    stream: Stream, patch: pytest.MonkeyPatch, checked: Callable[[Call], Call] = lambda call: call
) -> None:
    """Replace kernels by references; `checked` wraps each, so that it refuses what a launch would
    refuse."""
    use_references(patch)
    use_reference_verdicts(patch)
    for module, name, result in (
        (attend, "plan", _nothing),
        (attend, "attention", _nothing),
        (decoder, "kv_write", _nothing),
        (modelling, "kv_write", _nothing),
        (decoder, "rms_norm", lambda x, *_, **__: torch.empty_like(x)),
        (decoder, "silu_mul", _halves),
        (heads, "rms_norm", lambda x, *_, **__: torch.empty_like(x)),
        (drafting, "draw", _nothing),
        (verifying, "verify_logits", _verdict),
    ):
        patch.setattr(module, name, checked(as_queued(stream, getattr(module, name), result)))
