"""The request type of all traces, and the error that names file, line and field."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cbatch.core.request.errors import FieldError


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request of a trace; fields that the trace does not have are None."""

    arrival_s: float  # since the trace's first request
    prompt_tokens: int
    output_tokens: int
    # Names of the prompt's blocks of `hash_block_tokens` tokens each; the last block may be
    # partial. Requests with equal leading names have equal leading tokens.
    hash_ids: tuple[int, ...] | None = None
    hash_block_tokens: int | None = None
    session: str | None = None
    think_s: float | None = None  # for later turns: time since the end of the turn before
    priority: int | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None


class TraceError(FieldError):
    """Bad input in a trace, with file, field and line (from 1; None: the file as a whole)."""

    def __init__(
        self, path: str | Path, line: int | None, field: str, problem: str, remedy: str
    ) -> None:
        super().__init__(field, problem, remedy)
        self.path, self.line = str(path), line
        where = self.path if line is None else f"{self.path}, line {line}"
        self.args = (f"{where}: {field}: {problem}; {remedy}",)
