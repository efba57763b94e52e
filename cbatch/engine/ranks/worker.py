"""The process of a rank other than rank 0: it loads its share of the model, and handles rank 0's
messages until the connection closes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan
from cbatch.engine.backends import executor_for, load_for, row_invariance_of
from cbatch.engine.heads import take_head
from cbatch.engine.model_files import tokenizer_of
from cbatch.engine.ranks.messages import LOADED, READY, Probe, Reset, Serve, Start, digest
from cbatch.grammars import Grammars

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel
    from cbatch.runtime.cpu.decoder import Model
    from cbatch.runtime.cpu.executor import TorchExecutor
    from cbatch.runtime.rank_group import RankGroup


def main() -> None:
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
        target, draft = _load(start, ranks)
    except ValueError as error:  # invalid model or options; rank 0 raises the same error
        connection.send(str(error))
        return
    connection.send(LOADED)
    executor: TorchExecutor | None = None
    while True:
        match connection.recv():
            case StepPlan() as plan:
                assert executor is not None
                connection.send(digest(executor.run(plan)))
            case Probe():
                row_invariance_of(target)
            case Serve(config):
                grammars = _grammars(start, config)
                executor = cast("TorchExecutor", executor_for(target, draft, config, grammars))
            case Reset():
                assert executor is not None
                executor.reset()


def _load(start: Start, ranks: RankGroup) -> tuple[Model, AnyModel | None]:
    """Load this rank's share of the model, and the whole draft, as rank 0 does."""
    files, options = start.files, start.options
    load = partial(
        load_for,
        "cpu",
        dtype=options.dtype,
        numerics=options.numerics,
        random_weights_seed=options.random_weights_seed,
    )
    target = cast("Model", load(files.model, ranks=ranks, impl=files.impls[0]))
    if files.trial_texts:
        assert files.draft is not None
        return target, take_head(Path(files.draft), target, files.model, files.trial_texts)
    if files.draft is None:
        return target, None
    return target, load(files.draft, impl=files.impls[1])


def _grammars(start: Start, config: SchedulerConfig) -> Grammars | None:
    options = start.options
    if options.tokenizer == "none":
        return None
    source = options.tokenizer or start.files.model
    return Grammars(lambda: tokenizer_of(source), config.vocab_size, config.eos_ids)
