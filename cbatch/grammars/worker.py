"""A process that compiles grammars to find out whether they do, and may die of one.

It reads frames from its standard input and answers each on its standard output: first what the
grammars are over, then grammars.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
from tokenizers import Tokenizer

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.compiling import STACK_BYTES, Grammars, in_lark, with_stack
from cbatch.system.heap import give_back_free_memory
from cbatch.text import TextTokenizer

COMPILE_S = 2.0  # of processor time; the system ends a process that takes longer
MEMORY_BYTES = 128 * 2**20  # for one grammar, beside the stack of the thread that compiles
# The engine follows grammars in a thread of 8 MiB, and what one asks for grows with its text.
_TRIAL_STACK_BYTES = 4 * 2**20
_NICE = 10  # steps go first
LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True):
    """`tokenizer` as `tokenizers` writes it."""

    tokenizer: str
    vocab_size: int
    eos_ids: tuple[int, ...]


class GrammarVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """`problem` and `remedy` of a grammar that cannot be followed. `lark`: what one in GBNF is in
    Lark. `compile_s`: processor time, from there on. `begin_s`: what the engine takes for each text
    that begins to follow it, in the thread of its steps."""

    problem: str | None = None
    remedy: str = ""
    lark: str | None = None
    compile_s: float = 0.0
    begin_s: float = 0.0


def read_frame(source: BinaryIO) -> bytes | None:
    """None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return source.read(length)


def frame(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def try_out(grammars: Grammars, asked: StructuredOutputs) -> GrammarVerdict:
    try:
        quick = in_lark(asked)
        compile_s = -time.process_time()  # it is compiled in a thread of its own
        compiled = grammars.compiled(quick)
        compile_s += time.process_time()  # by the system's ticks, while a limit runs
        begin_s = -time.thread_time()
        compiled.matcher.deep_copy().compute_bitmask()
        begin_s += time.thread_time()
    except FieldError as error:
        return GrammarVerdict(error.problem, error.remedy)
    lark = quick.grammar if quick is not asked else None
    return GrammarVerdict(lark=lark, compile_s=compile_s, begin_s=begin_s)


def main() -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    setup = msgspec.json.decode(first, type=Setup)
    tokenizer = TextTokenizer(Tokenizer.from_str(setup.tokenizer), "the server's model")
    grammars = Grammars(lambda: tokenizer, setup.vocab_size, setup.eos_ids, kept_s=0)
    grammars.prepare()
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def answer(verdict: GrammarVerdict) -> None:
        answers.write(frame(msgspec.json.encode(verdict)))
        answers.flush()

    def serve() -> None:
        while (content := read_frame(source)) is not None:
            _limit_memory()
            signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
            verdict = try_out(grammars, msgspec.json.decode(content, type=StructuredOutputs))
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer(verdict)
            give_back_free_memory()

    answer(GrammarVerdict())
    with_stack(_TRIAL_STACK_BYTES, serve)


def _limit_memory() -> None:
    """From what it takes now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return  # not Linux, where address space is not limited either
    limit_bytes = pages * resource.getpagesize() + STACK_BYTES + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
