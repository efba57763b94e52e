"""Which runtime serves a device: that of the CPU, or kernels. Only a GPU needs triton."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS, MODEL
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import policy_class
from cbatch.engine.options import EngineOptions, parse_lookahead

if TYPE_CHECKING:
    from cbatch.runtime.cpu.decoder import Model
    from cbatch.runtime.cpu.drafter import Drafter
    from cbatch.runtime.cpu.executor import TorchExecutor
    from cbatch.runtime.gpu import Decoder, GpuExecutor
    from cbatch.runtime.sampling.structured import GrammarSource

    AnyModel = Model | Decoder

_LEAST_CAPABILITY = (8, 0)  # has bf16, and copies to shared memory that do not wait
_logger = logging.getLogger("cbatch")


def is_gpu(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def usual_device(**asked: Any) -> str:
    """The GPU, if torch sees one that serves all that is `asked` (as `refuse_unserved`); else the
    CPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    problem = _problem_of_gpu()
    if problem is None:
        try:
            refuse_unserved("cuda", **asked)
            return "cuda"
        except FieldError as error:
            problem = f"{error.field}: {error.problem}"
    _logger.warning("the GPU that torch sees is not used: %s", problem)
    return "cpu"


def _problem_of_gpu() -> str | None:
    """Why our kernels do not run on the GPU that torch sees."""
    import torch

    if torch.version.cuda is None:
        return "this torch was not built with CUDA"
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        capability = torch.cuda.get_device_capability()
    except RuntimeError as error:
        return f"it does not answer: {error}"
    if capability < _LEAST_CAPABILITY:
        return "its compute capability is {}.{}; kernels need {}.{}".format(
            *capability, *_LEAST_CAPABILITY
        )
    return None


def load_for(
    device: str, path: str | Path, *, dtype: str, numerics: str, random_weights_seed: int | None
) -> AnyModel:
    """Raises the runtime's error naming file and field."""
    if is_gpu(device):
        from cbatch.runtime.gpu import load_decoder

        return load_decoder(
            path, dtype=dtype, device=device, random_weights_seed=random_weights_seed
        )
    from cbatch.runtime.cpu.decoder import load_model

    if device.partition(":")[0] != "cpu":
        raise FieldError("device", f"{device!r} is not served", "use auto, cpu or cuda")
    return load_model(path, dtype=dtype, numerics=numerics, random_weights_seed=random_weights_seed)


def executor_for(
    target: AnyModel,
    draft: AnyModel | None,
    config: SchedulerConfig,
    grammars: GrammarSource | None = None,
) -> TorchExecutor | GpuExecutor:
    """`grammars` where `serves_grammars`."""
    if is_gpu(str(target.device)):
        return _gpu_executor(cast("Decoder", target), cast("Decoder | None", draft), config)
    from cbatch.runtime.cpu.executor import TorchExecutor

    return TorchExecutor(
        cast("Model", target),
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        max_slots=config.max_slots,
        drafter=_drafter(cast("Model | None", draft), config),
        grammars=grammars,
    )


def depth_for(device: str, overlap: Literal[0, 1] | None) -> int:
    """Plans that are under way beside the one that runs. A GPU that waits for the next plan is
    idle; a CPU plans with the processors that compute."""
    return int(is_gpu(device)) if overlap is None else overlap


def refuse_unserved(
    device: str, *, numerics: str, drafter: tuple[str, ...] | None, block_size_tokens: int
) -> None:
    """Options that only the CPU executor can serve. Raises `FieldError`."""
    if not is_gpu(device):
        return
    pages = block_size_tokens >= 16 and not block_size_tokens & (block_size_tokens - 1)
    checks: tuple[tuple[str, Any, bool, str], ...] = (
        ("numerics", numerics, numerics != "invariant", "use auto or fast"),
        ("drafter", drafter, not set(drafter or ()) & set(LOOKUPS), "give a draft, use 'model'"),
        ("block_size_tokens", block_size_tokens, pages, "use 16, 32, 64 or 128"),
    )
    for field, value, ok, remedy in checks:
        if not ok:
            raise FieldError(
                field, f"{value!r} is not served on a GPU", f"{remedy}, or device 'cpu'"
            )


def held_drafters(config: SchedulerConfig, device: str) -> tuple[str, ...]:
    """The drafters that requests may name: all that there are, where anybody drafts at all. Lookups
    live on the host, which on a GPU does not know the latest tokens."""
    if not config.default_chain:
        return ()
    if is_gpu(device):
        return (MODEL,)
    return DRAFTERS if config.draft_context_tokens is not None else LOOKUPS


def serves_grammars(device: str) -> bool:
    """A grammar is followed on the host, which on a GPU does not know the latest tokens."""
    return not is_gpu(device)


def row_invariance_of(target: AnyModel) -> tuple[bool, str]:
    """Whether a row's bits are its own, and the same in words."""
    if is_gpu(str(target.device)):
        return False, f"row_invariant: no (numerics={target.numerics}; a library's products)"
    from cbatch.runtime.cpu.invariance import probe_row_invariance

    report = probe_row_invariance(cast("Model", target))
    return report.row_invariant, str(report)


def gpu_step_bytes(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """What an executor with these options takes of a GPU's memory beside weights and KV."""
    from cbatch.engine.step_profile import MOST_DRAFTS
    from cbatch.runtime.gpu.memory import StepLimits, step_memory_bytes

    lookahead = parse_lookahead(options.lookahead)
    drafts = 0 if lookahead.policy == "off" else max(lookahead.k, MOST_DRAFTS)
    limits = StepLimits(
        max_slots=options.max_slots,
        max_sequence_tokens=max_tokens,
        step_budget_tokens=max(options.step_budget_tokens, options.max_slots),
        block_size_tokens=options.block_size_tokens,
        max_drafts=drafts if draft is not None else 0,
    )
    return step_memory_bytes(cast("Decoder", target), cast("Decoder | None", draft), limits)


def _gpu_executor(target: Decoder, draft: Decoder | None, config: SchedulerConfig) -> GpuExecutor:
    from cbatch.engine.step_profile import shapes_for
    from cbatch.runtime.gpu import GpuExecutor

    drafts = config.lookahead.policy != "off"
    most = [config.lookahead.k]
    if policy_class(config.lookahead.policy).priced:  # its prices are measured in these shapes
        most += [shape.num_drafts for shape in shapes_for(config)]
    executor = GpuExecutor(
        target,
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        max_slots=config.max_slots,
        max_sequence_tokens=config.max_sequence_tokens,
        step_budget_tokens=config.step_budget_tokens,
        draft=draft if drafts else None,
        max_drafts=max(most) if drafts else 0,
    )
    executor.capture()
    return executor


def _drafter(draft: Model | None, config: SchedulerConfig) -> Drafter | None:
    from cbatch.runtime.drafting.chain import ChainDrafter
    from cbatch.runtime.drafting.draft_model import DraftModel
    from cbatch.runtime.drafting.lookup import LookupDrafter
    from cbatch.runtime.drafting.ngram import NgramLookup
    from cbatch.runtime.drafting.suffix import SuffixLookup

    if not config.default_chain or config.lookahead.policy == "off":
        return None
    return ChainDrafter(
        model=None if draft is None else DraftModel(draft),
        lookups={"ngram": LookupDrafter(NgramLookup()), "suffix": LookupDrafter(SuffixLookup())},
        default=config.default_chain,
        model_price=config.catch_up_price,
    )
