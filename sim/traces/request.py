"""What every trace is read into, and the error that names file, line and field."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cbatch.core.request.errors import FieldError


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request as a trace tells it; a field that the trace does not know is None."""

    arrival_s: float  # since the first request of the trace
    prompt_tokens: int
    output_tokens: int
    # Names of the prompt's blocks of `hash_block_tokens` tokens each, the last one perhaps not
    # full: requests share what their leading names share.
    hash_ids: tuple[int, ...] | None = None
    hash_block_tokens: int | None = None
    session: str | None = None
    think_s: float | None = None  # of a session's later turns: after the turn before has ended
    priority: int | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None


class TraceError(FieldError):
    """Bad input in a trace: file, line (from 1; None: the file as a whole) and field."""

    def __init__(
        self, path: str | Path, line: int | None, field: str, problem: str, remedy: str
    ) -> None:
        super().__init__(field, problem, remedy)
        self.path, self.line = str(path), line
        where = self.path if line is None else f"{self.path}, line {line}"
        self.args = (f"{where}: {field}: {problem}; {remedy}",)
