"""Offline rerun of a drafter over recorded texts: the fate of its drafts at every position."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.build import load_core
from cbatch.engine.core import EngineCore
from cbatch.engine.options import EngineOptions
from cbatch.engine.prices.meter import StepMeter
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.lookups import chain_drafter
from sim.advise.recording import DraftedRow, RecordedText, Recording
from sim.advise.texts import Fates, RerunExecutor

SLOTS = 16  # texts at once
_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization", "max_model_len")
_SIZES += ("num_speculative_tokens",)
_RESERVE_TOKENS = 32  # KV positions of a slot after its text and its drafts


class Rerun(NamedTuple):
    """Fates by text, and steps whose `draft_s` was measured here. `checked` recorded rows were
    drafted by this drafter; `differing` of them have another fate here."""

    fates: dict[str, Fates]
    samples: list[StepSample]
    checked: int
    differing: int


def load_drafts(recording: Recording, model: str | None, draft: str | None) -> EngineCore:
    """Load the target and its draft, by default those that the log names. Raises `FieldError`."""
    engine = recording.engine
    names = {"--model": model or engine.model, "--draft": draft or engine.draft}
    for option, name in names.items():
        if name is None or (Path(name).is_absolute() and not Path(name).exists()):
            problem = "the log does not name it" if name is None else f"{name} does not exist"
            raise FieldError(option, problem, "give the path of the model")
    small: dict[str, Any] = dict.fromkeys(_SIZES)  # only the models are needed
    small |= {"num_blocks": 1, "max_num_seqs": 1, "overlap": 0, "tensor_parallel_size": 1}
    # A log of a later version may have further options.
    known = {k: v for k, v in engine.options.items() if k in EngineOptions.__struct_fields__}
    try:
        options = msgspec.convert(known, EngineOptions)
    except msgspec.ValidationError as error:
        raise FieldError("LOG", f"options: {error}", "record it again") from error
    options = replace(options, lookahead="fixed:1", drafter=(MODEL,), **small)
    core, _, _ = load_core(names["--model"], names["--draft"], options, handles_text=False)
    if not isinstance(core.executor, TorchExecutor):
        core.resources.close()
        raise FieldError("--draft", "is rerun on a CPU only", "hide the GPU: CUDA_VISIBLE_DEVICES=")
    return core


def rejects(recording: Recording) -> bool:
    """Return whether the drafts of some requests are verified by rejection sampling."""
    params = (text.request.params for text in recording.texts.values())
    return any(not each.greedy and not each.coupled for each in params)


def rerun(
    recording: Recording,
    drafter: str,
    k: int,
    core: EngineCore | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> Rerun:
    """Draft `k` tokens at every position of every output, and call `on_text` after each text.
    `core` has the models of the drafter `model`. Lookups need none."""
    texts, model, target, context_tokens = recording.texts, None, None, None
    if drafter == MODEL:
        assert core is not None
        model, context_tokens = (
            core.executor.drafter.model,
            core.scheduler.config.draft_context_tokens,
        )
        if model.hidden_layers or rejects(recording):
            target = core.executor.model
    longest = max(len(text.request.prompt) + len(text.output) for text in texts.values())
    longest += k + _RESERVE_TOKENS
    config = replace(
        recording.engine.config,
        max_num_seqs=SLOTS,
        num_blocks=SLOTS * (-(-longest // recording.engine.config.block_size) + 1),
        max_num_batched_tokens=2 * SLOTS * longest,  # a draft model catches up at once
        queue_policy="fcfs",
        enable_prefix_caching=False,
        kv_events=False,
        prompt_share=1.0,
        itl_target_s=None,
        drafter=(drafter,),
        draft_context_tokens=context_tokens,
        lookahead=LookaheadConfig(policy="fixed", k=k),
        cost_profile=None,
    )
    executor = RerunExecutor(texts, config, chain_drafter(config, model), target)
    samples = _serve(Scheduler(config), StepMeter(executor, SLOTS), texts.values(), on_text)
    rows = recording.drafts if recording.engine.config.default_chain == (drafter,) else []
    verdicts = [_agrees(row, executor.fates, drafter, k) for row in rows]
    return Rerun(
        executor.fates, samples, len(verdicts) - verdicts.count(None), verdicts.count(False)
    )


def _serve(
    scheduler: Scheduler,
    meter: StepMeter,
    texts: Iterable[RecordedText],
    on_text: Callable[[], None],
) -> list[StepSample]:
    """Serve the texts in turn. Return the samples of the steps that drafted."""
    remaining, samples, step_s = iter(texts), [], 0.0
    while True:
        while scheduler.num_waiting < SLOTS and (text := next(remaining, None)) is not None:
            scheduler.add(text.request, step_s)
        plan = scheduler.schedule(step_s)
        if plan is None:
            return samples
        step_s += 1.0
        commit = scheduler.update_from_output(meter.run(plan), step_s)
        if meter.last.draft_s > 0:
            samples.append(meter.last)
        for _ in commit.finished:
            on_text()


def _agrees(row: DraftedRow, fates: dict[str, Fates], drafter: str, k: int) -> bool | None:
    """Return whether a recorded row has the fate of the rerun. Return None if that is unknown: the
    draft model lagged, the row drafted more than `k` tokens, or its drafts reach the end of a text
    that was cut."""
    text = row.text
    left = len(text.output) - row.position
    lagged = drafter == MODEL and not row.drafted
    if lagged or row.planned > k or left <= row.planned * text.cut:
        return None
    drafted, accepted = (int(each[row.position]) for each in fates[text.request.request_id])
    drafted = min(row.planned, drafted)
    return (row.drafted, min(row.accepted, left)) == (drafted, min(drafted, accepted, left))
