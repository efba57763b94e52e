"""The picklable description from which an engine process builds its engine."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from cbatch.engine.core import EngineCore
from cbatch.engine.options import EngineOptions
from cbatch.system.logs import LogFormat
from cbatch.system.logs import configure as configure_logs


class EngineFactory(msgspec.Struct, frozen=True):
    """Calls `load_core` in the engine process, which handles token ids only. Imports happen
    there, so that the server process starts sooner and does not load torch."""

    model: str | Path
    draft: str | Path | None
    options: EngineOptions
    log_format: LogFormat = "text"
    record: str | Path | None = None  # step log to append to
    kv_events: bool = False  # record what enters and leaves the prefix cache

    def __call__(self) -> EngineCore:
        from cbatch.engine.build import load_core
        from cbatch.engine.ranks.group import RankedExecutor, end_engine
        from cbatch.steplog.recorder import StepRecorder

        configure_logs(self.log_format, logging.WARNING)
        recorder = None
        if self.record is not None:
            models = {"model": _lasting(self.model), "draft": _lasting(self.draft)}
            options = msgspec.to_builtins(self.options)
            recorder = StepRecorder(self.record, models=models | {"options": options})
        core, _, _ = load_core(
            self.model,
            self.draft,
            self.options,
            handles_text=False,
            log=recorder,
            kv_events=self.kv_events,
        )
        if recorder is not None:
            core.resources.callback(recorder.close)
        if core.grammars is not None:
            core.on_ready = core.grammars.prepare
        if isinstance(core.executor, RankedExecutor):
            core.executor.ranks.on_lost(end_engine)
        return core


def _lasting(model: str | Path | None) -> str | None:
    if model is None or not Path(model).exists():
        return None if model is None else str(model)
    return str(Path(model).resolve())
