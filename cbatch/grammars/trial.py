"""A task for a worker: find out whether a grammar can be followed. The worker may die of it."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.compiling import STACK_BYTES, Grammars, read, with_stack
from cbatch.workers import TaskLimits

MEMORY_BYTES = 128 * 2**20  # for one grammar, besides the stacks of the threads that compile it
# The engine follows grammars in a thread of 8 MiB, and what one asks for grows with its text.
_TRIAL_STACK_BYTES = 4 * 2**20
LIMITS = TaskLimits(2.0, MEMORY_BYTES + STACK_BYTES + _TRIAL_STACK_BYTES, aside=True)


class GrammarVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """`problem` and `remedy` of a grammar that cannot be followed. `quick` is the result of `read`,
    if it differs. `compile_s`: processor time, from there on. `begin_s`: what the engine takes for
    each text that begins to follow it, in the thread of its steps."""

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
    """What the workers' fork server makes. `grammars` keep none that nobody holds."""

    grammars: Grammars


def try_out(asked: StructuredOutputs, state: TrialState) -> GrammarVerdict:
    return with_stack(_TRIAL_STACK_BYTES, partial(_try_out, asked, state.grammars))


def _try_out(asked: StructuredOutputs, grammars: Grammars) -> GrammarVerdict:
    try:
        quick = read(asked)
        compile_s = -time.process_time()  # it is compiled in a thread of its own
        compiled = grammars.compiled(quick)
        compile_s += time.process_time()  # by the system's ticks, while a limit runs
        begin_s = -time.thread_time()
        compiled.matcher.deep_copy().compute_bitmask()
        begin_s += time.thread_time()
    except FieldError as error:
        return GrammarVerdict(error.problem, error.remedy)
    changed = None if quick is asked else quick
    return GrammarVerdict(quick=changed, compile_s=compile_s, begin_s=begin_s)
