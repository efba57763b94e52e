"""How an engine process makes its engine: a value that a new process can be given."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import msgspec

from cbatch.engine.options import EngineOptions
from cbatch.process.server import EngineParts
from cbatch.system.logs import LogFormat
from cbatch.system.logs import configure as configure_logs


class EngineFactory(msgspec.Struct, frozen=True):
    """`load_engine`, to be called in a process of its own, which handles token ids alone. What it
    needs is imported there: the owner of the process does without, and starts sooner."""

    model: str | Path
    draft: str | Path | None
    options: EngineOptions
    log_format: LogFormat = "text"
    record: str | Path | None = None  # a step log, which it appends to
    kv_events: bool = False  # it tells what enters and leaves its prefix cache

    def __call__(self) -> EngineParts:
        from cbatch.engine.build import load_engine
        from cbatch.engine.ranks.executor import RankedExecutor
        from cbatch.engine.ranks.group import end_engine
        from cbatch.steplog.recorder import StepRecorder

        configure_logs(self.log_format, logging.WARNING)
        recorder = None if self.record is None else StepRecorder(self.record)
        engine, info = load_engine(
            self.model,
            self.draft,
            self.options,
            handles_text=False,
            log=recorder,
            kv_events=self.kv_events,
        )
        if engine.grammars is not None:
            engine.grammars.prepare()
        executor = getattr(engine.loop.executor, "executor", engine.loop.executor)
        closing = ExitStack()
        if recorder is not None:
            closing.callback(recorder.close)
        if isinstance(executor, RankedExecutor):
            closing.callback(executor.ranks.close)
            executor.ranks.on_lost(end_engine)
        return EngineParts(
            engine.scheduler,
            engine.loop,
            engine.drafters,
            msgspec.to_builtins(info),
            grammars=engine.grammars,
            # None: its steps are too short to have parts.
            report_progress=getattr(executor, "report_progress", None),
            close=closing.close,
        )
