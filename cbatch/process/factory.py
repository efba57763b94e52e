"""The picklable description from which an engine process builds its engine."""

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
    """Calls `load_engine` in the engine process, which handles token ids only. Imports happen
    there, so that the server process starts sooner and does not load torch."""

    model: str | Path
    draft: str | Path | None
    options: EngineOptions
    log_format: LogFormat = "text"
    record: str | Path | None = None  # step log to append to
    kv_events: bool = False  # record what enters and leaves the prefix cache

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
            # None for an executor whose steps are too short to report progress within.
            report_progress=getattr(executor, "report_progress", None),
            close=closing.close,
        )
