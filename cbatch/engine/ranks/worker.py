"""The process of a rank other than rank 0: it loads its share of the model, and handles rank 0's
messages until the connection closes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor
from cbatch.core.scheduler.plan import StepPlan
from cbatch.engine.model_files import backend_of, tokenizer_of
from cbatch.engine.prices.startup import max_drafts
from cbatch.engine.ranks.group import LOADED, READY, Probe, Reset, Serve, Start, digest
from cbatch.grammars import Grammars


def main() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):  # rank 0 gets the keys of a terminal, too
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank_0, name="cbatch-rank-0", daemon=True).start()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(connection)
    os._exit(0)  # gloo's threads may hold tensors, whose release aborts an interpreter that ends


def _end_with_rank_0() -> None:
    """Exit when standard input ends, even in the middle of a step."""
    sys.stdin.buffer.read()
    os._exit(1)


def _serve(connection: Connection[Any, Any]) -> None:
    import torch

    from cbatch.runtime.rank_group import join

    start: Start = connection.recv()
    logging.getLogger("cbatch").setLevel(logging.ERROR)  # rank 0 logs the rest
    torch.set_num_threads(start.threads)
    connection.send(READY)
    ranks = join(start.rank, start.size, start.folder)
    try:
        models = backend_of(start.request.device).load(start.request, ranks)
    except ValueError as error:  # invalid model or options; rank 0 raises the same error
        connection.send(str(error))
        return
    connection.send(LOADED)
    executor: Executor | None = None
    while True:
        match connection.recv():
            case StepPlan() as plan:
                assert executor is not None
                connection.send(digest(executor.run(plan)))
            case Probe():
                models.batch_invariance()
            case Serve(config):
                executor = models.executor(config, max_drafts(config), _grammars(start, config))
            case Reset():
                assert executor is not None
                executor.reset()


def _grammars(start: Start, config: SchedulerConfig) -> Grammars | None:
    if start.tokenizer == "none":
        return None
    source = start.tokenizer or start.request.model
    return Grammars(lambda: tokenizer_of(source), config.vocab_size, config.eos_ids)
