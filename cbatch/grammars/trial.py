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
# Half of the 8 MiB of an engine's threads, which run compiled grammars: a margin, since the stack
# that a grammar needs grows with its text.
_TRIAL_STACK_BYTES = 4 * 2**20
LIMITS = TaskLimits(2.0, MEMORY_BYTES + STACK_BYTES + _TRIAL_STACK_BYTES, aside=True)


class GrammarVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a trial. `problem` and `remedy` are set for an invalid grammar. `converted` is
    the result of `read`, None if it equals the grammar. `compile_s` is the processor time to
    compile it. `start_s` is the time that an engine's step takes to start it for one choice."""

    problem: str | None = None
    remedy: str = ""
    converted: StructuredOutputs | None = None
    compile_s: float = 0.0
    start_s: float = 0.0

    @property
    def num_chars(self) -> int:
        """Length of `converted`."""
        spec = self.converted
        return 0 if spec is None else len(spec.json or spec.grammar or "")


class TrialState(Protocol):
    """The argument of every task, made by the fork server. `grammars` keeps no unused grammars."""

    grammars: Grammars


def try_out(spec: StructuredOutputs, state: TrialState) -> GrammarVerdict:
    """Test a grammar in a thread with a smaller stack than the engine's."""
    return with_stack(_TRIAL_STACK_BYTES, partial(_try_out, spec, state.grammars))


def _try_out(spec: StructuredOutputs, grammars: Grammars) -> GrammarVerdict:
    try:
        converted = read(spec)
        compile_s = -time.process_time()  # compiling runs in its own thread
        compiled = grammars.compiled(converted)
        compile_s += time.process_time()  # rounded to the kernel's ticks while a CPU limit is set
        start_s = -time.thread_time()
        compiled.matcher.deep_copy().compute_bitmask()
        start_s += time.thread_time()
    except FieldError as error:
        return GrammarVerdict(error.problem, error.remedy)
    changed = None if converted is spec else converted
    return GrammarVerdict(converted=changed, compile_s=compile_s, start_s=start_s)
