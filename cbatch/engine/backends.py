"""Which runtime serves a device: that of the CPU, or kernels. Only a GPU needs triton."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import policy_class
from cbatch.engine.model_impl import Impl, refuse_beside
from cbatch.engine.options import EngineOptions, parse_lookahead

if TYPE_CHECKING:
    import torch

    from cbatch.runtime.cpu.decoder import Model
    from cbatch.runtime.cpu.drafter import Drafter
    from cbatch.runtime.cpu.executor import TorchExecutor
    from cbatch.runtime.cpu.head import Head
    from cbatch.runtime.cpu.rank_group import RankGroup
    from cbatch.runtime.cpu.transformers_backend.model import TransformersModel
    from cbatch.runtime.drafting.lookup import Lookup
    from cbatch.runtime.gpu import Decoder, GpuExecutor
    from cbatch.runtime.gpu.memory import Draft
    from cbatch.runtime.gpu.modelling import ModellingDecoder
    from cbatch.runtime.sampling.structured import GrammarSource

    AnyModel = Model | TransformersModel | Decoder | ModellingDecoder | Head

_LEAST_CAPABILITY = (8, 0)  # has bf16, and copies to shared memory that do not wait
_logger = logging.getLogger("cbatch")


def is_gpu(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def usual_device(*, numerics: str, **asked: Any) -> str:
    """The GPU, if torch sees one that serves all that is `asked` (as `refuse_unserved`); else the
    CPU, and for invariant numerics and transformers' modelling code: they were seen to hold there
    alone."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    problem = problem_of_gpu()
    if problem is None and numerics == "invariant":
        problem = "numerics: 'invariant' was never tried on one; --device cuda does"
    if problem is None and asked.get("impl", "own") != "own":
        problem = "this model's code was never tried on one; --device cuda does"
    if problem is None:
        try:
            refuse_unserved("cuda", **asked)
            return "cuda"
        except FieldError as error:
            problem = f"{error.field}: {error.problem}"
    _logger.warning("the GPU that torch sees is not used: %s", problem)
    return "cpu"


def problem_of_gpu() -> str | None:
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


def require_device(device: str) -> None:
    """Raises `FieldError` for a device that is unknown, or not here."""
    import torch

    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise FieldError("device", f"{device!r} is not served", "use auto, cpu, cuda or cuda:1")
    if is_gpu(device):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            built = "" if torch.version.cuda else f" ({torch.__version__} is built without CUDA)"
            problem = f"{device!r} is not here: torch sees {count} GPUs{built}"
            raise FieldError("device", problem, "use auto or cpu")


def load_for(
    device: str,
    path: str | Path,
    *,
    dtype: str,
    numerics: str,
    random_weights_seed: int | None,
    ranks: RankGroup | None = None,
    impl: Impl = "own",
) -> AnyModel:
    """Of several `ranks` this one's share. Raises the runtime's error naming file and field."""
    if impl == "transformers":
        return _load_modelling(device, path, dtype, numerics, random_weights_seed, ranks)
    if is_gpu(device):
        from cbatch.runtime.gpu import load_decoder

        return load_decoder(
            path,
            dtype=dtype,
            device=device,
            numerics=numerics,
            random_weights_seed=random_weights_seed,
        )
    from cbatch.runtime.cpu.decoder import load_model

    return load_model(
        path,
        dtype=dtype,
        numerics=numerics,
        random_weights_seed=random_weights_seed,
        ranks=ranks,
    )


def _load_modelling(
    device: str,
    path: str | Path,
    dtype: str,
    numerics: str,
    seed: int | None,
    ranks: RankGroup | None,
) -> TransformersModel | ModellingDecoder:
    """By transformers' modelling code."""
    asked: Any = {"dtype": dtype, "numerics": numerics, "random_weights_seed": seed}
    if is_gpu(device):
        from cbatch.runtime.gpu.modelling import load_modelling_decoder

        return load_modelling_decoder(path, device=device, **asked)
    from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model

    return load_transformers_model(path, ranks=ranks, **asked)


def executor_for(
    target: AnyModel,
    draft: AnyModel | None,
    config: SchedulerConfig,
    grammars: GrammarSource | None = None,
    kv_cache_dtype: str = "auto",
    default_params: SamplingParams | None = None,
) -> TorchExecutor | GpuExecutor:
    """On a GPU no request waits for kernels that `default_params` need."""
    if is_gpu(str(target.device)):
        from cbatch.runtime.gpu.late import groups_of

        gpu_draft = cast("Draft | None", draft)
        made = _gpu_executor(cast("Decoder", target), gpu_draft, config, grammars, kv_cache_dtype)
        made.capture(groups_of(default_params or SamplingParams()))
        return made
    from cbatch.runtime.cpu.executor import TorchExecutor

    return TorchExecutor(
        cast("Model", target),
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        max_slots=config.max_slots,
        drafter=_drafter(cast("Model | Head | None", draft), config),
        grammars=grammars,
    )


def depth_for(device: str, overlap: Literal[0, 1] | None) -> int:
    """Plans that are under way beside the one that runs. A GPU that waits for the next plan is
    idle; a CPU plans with the processors that compute."""
    return int(is_gpu(device)) if overlap is None else overlap


def block_size_for(target: AnyModel, options: EngineOptions) -> int:
    """Tokens of a KV block: as given, or on a GPU what attention reads fastest."""
    return options.block_size_tokens or (64 if is_gpu(str(target.device)) else 16)


def refuse_unserved(
    device: str,
    *,
    block_size_tokens: int | None,
    kv_cache_dtype: str,
    head: Path | None = None,
    tensor_parallel: int = 1,
    impl: Impl = "own",
) -> None:
    """Options that only the executor of another device can serve. Raises `FieldError`."""
    refuse_beside(impl, head=head)
    if tensor_parallel > 1:
        _refuse_unshared(device, tensor_parallel)
    if not is_gpu(device):
        if kv_cache_dtype != "auto":
            problem = f"{kv_cache_dtype!r} is not served on a CPU"
            raise FieldError("kv_cache_dtype", problem, "leave it out, or use --device cuda")
        return
    size = block_size_tokens
    if size is not None and (size < 16 or size & (size - 1)):
        raise FieldError(
            "block_size_tokens",
            f"{block_size_tokens!r} is not served on a GPU",
            "use 16, 32, 64 or 128, or --device cpu",
        )


def _refuse_unshared(device: str, tensor_parallel: int) -> None:
    if is_gpu(device):
        problem = f"{tensor_parallel} ranks are served on CPUs alone"
        raise FieldError("tensor_parallel", problem, "use --device cpu, or leave it out")


def held_drafters(config: SchedulerConfig) -> tuple[str, ...]:
    """The drafters that requests may name: all that there are, where anybody drafts at all."""
    if not config.default_chain:
        return ()
    return DRAFTERS if config.draft_context_tokens is not None else LOOKUPS


def num_ranks(target: AnyModel) -> int:
    """That hold a share of it each, this process among them."""
    group = getattr(target, "ranks", None)
    return 1 if group is None else cast("RankGroup", group).size


def code_of(target: AnyModel) -> str:
    """Whose modelling code computes it, in words."""
    told: str | None = getattr(target, "code", None)
    return told or f"our own ({target.config.family})"


def row_invariance_of(target: AnyModel) -> tuple[bool, str]:
    """Whether a row's bits are its own, and the same in words."""
    if is_gpu(str(target.device)):
        decoder = cast("Decoder", target)
        if decoder.numerics != "invariant":
            return False, f"row_invariant: no (numerics={decoder.numerics}; a library's products)"
        holds = decoder.keeps_bits()
        found = "" if holds else "; rows of this device's products did not keep their bits"
        told = "yes" if holds else "no"
        return holds, f"row_invariant: {told} (numerics=invariant; fixed tiles{found})"
    from cbatch.runtime.cpu.invariance import probe_row_invariance

    report = probe_row_invariance(cast("Model", target))
    return report.row_invariant, str(report)


def kv_dtype_of(model: AnyModel, kv_cache_dtype: str) -> torch.dtype:
    """What keys and values are held in. Raises `FieldError` where the device has no such type."""
    if kv_cache_dtype == "auto":
        return model.dtype
    from cbatch.runtime.gpu.kv_types import fp8_for

    return fp8_for(cast("Decoder", model))


def gpu_step_bytes(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """What an executor with these options takes of a GPU's memory beside weights and KV."""
    from cbatch.engine.prices.startup import MOST_DRAFTS
    from cbatch.runtime.gpu.heads import GpuHead
    from cbatch.runtime.gpu.memory import StepLimits, step_memory_bytes

    lookahead = parse_lookahead(options.lookahead)
    drafts = 0 if lookahead.policy == "off" else max(lookahead.k, MOST_DRAFTS)
    limits = StepLimits(
        max_slots=options.max_slots,
        max_sequence_tokens=max_tokens,
        step_budget_tokens=max(options.step_budget_tokens, options.max_slots),
        block_size_tokens=block_size_for(target, options),
        max_drafts=drafts if draft is not None or options.drafter is not None else 0,
        reads=isinstance(draft, GpuHead),
    )
    return step_memory_bytes(cast("Decoder", target), cast("Draft | None", draft), limits)


def _gpu_executor(
    target: Decoder,
    draft: Draft | None,
    config: SchedulerConfig,
    grammars: GrammarSource | None,
    kv_cache_dtype: str,
) -> GpuExecutor:
    from cbatch.engine.prices.startup import shapes_for
    from cbatch.runtime.gpu import GpuExecutor
    from cbatch.runtime.gpu.host_drafts import LookupSettings

    drafts = bool(config.default_chain) and config.lookahead.policy != "off"
    most = [config.lookahead.k]
    if policy_class(config.lookahead.policy).priced:  # its prices are measured in these shapes
        most += [shape.num_drafts for shape in shapes_for(config)]
    return GpuExecutor(
        target,
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        max_slots=config.max_slots,
        max_sequence_tokens=config.max_sequence_tokens,
        step_budget_tokens=config.step_budget_tokens,
        draft=draft if drafts else None,
        max_drafts=max(most) if drafts else 0,
        lookups=LookupSettings(_lookups(), config.default_chain, config.catch_up_price)
        if drafts
        else None,
        grammars=grammars,
        kv_dtype=kv_dtype_of(target, kv_cache_dtype),
    )


def _lookups() -> dict[str, Lookup]:
    from cbatch.runtime.drafting.ngram import NgramLookup
    from cbatch.runtime.drafting.suffix import SuffixLookup

    return {"ngram": NgramLookup(), "suffix": SuffixLookup()}


def _drafter(draft: Model | Head | None, config: SchedulerConfig) -> Drafter | None:
    from cbatch.runtime.drafting.chain import ChainDrafter
    from cbatch.runtime.drafting.kinds import drafter_of
    from cbatch.runtime.drafting.lookup import LookupDrafter

    if not config.default_chain or config.lookahead.policy == "off":
        return None
    return ChainDrafter(
        model=None if draft is None else drafter_of(draft),
        lookups={name: LookupDrafter(lookup) for name, lookup in _lookups().items()},
        default=config.default_chain,
        model_price=config.catch_up_price,
    )
