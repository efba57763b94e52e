"""A worker's task that tests whether a grammar compiles and starts. It may kill the worker."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.compiling import STACK_BYTES, Grammars, read, with_stack
from cbatch.workers import TaskLimits

MEMORY_BYTES = 128 * 2**20  # for one grammar, on top of the stacks of the compiling threads
# Half of the engine's stack for grammars, as a margin: the need grows with the text's length.
_TRIAL_STACK_BYTES = 4 * 2**20
LIMITS = TaskLimits(2.0, MEMORY_BYTES + STACK_BYTES + _TRIAL_STACK_BYTES, aside=True)


class GrammarVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a trial. `problem` and `remedy` are set for an invalid grammar. `quick` is the
    result of `read`, if it differs from the grammar. `compile_s` is the processor time to compile
    `quick`. `begin_s` is the time that an engine's step takes to start the grammar for a choice."""

    problem: str | None = None
    remedy: str = ""
    quick: StructuredOutputs | None = None
    compile_s: float = 0.0
    begin_s: float = 0.0

    @property
    def num_chars(self) -> int:
        """Length of `quick`."""
        return 0 if self.quick is None else len(self.quick.json or self.quick.grammar or "")


class TrialState(Protocol):
    """The argument of every task, made by the fork server. `grammars` keeps no unused grammars."""

    grammars: Grammars


def try_out(spec: StructuredOutputs, state: TrialState) -> GrammarVerdict:
    """Test a grammar in a thread with a smaller stack than the engine's."""
    return with_stack(_TRIAL_STACK_BYTES, partial(_try_out, spec, state.grammars))


def _try_out(spec: StructuredOutputs, grammars: Grammars) -> GrammarVerdict:
    try:
        quick = read(spec)
        compile_s = -time.process_time()  # compiling runs in its own thread
        compiled = grammars.compiled(quick)
        compile_s += time.process_time()  # rounded to the kernel's ticks while a CPU limit is set
        begin_s = -time.thread_time()
        compiled.matcher.deep_copy().compute_bitmask()
        begin_s += time.thread_time()
    except FieldError as error:
        return GrammarVerdict(error.problem, error.remedy)
    changed = None if quick is spec else quick
    return GrammarVerdict(quick=changed, compile_s=compile_s, begin_s=begin_s)
