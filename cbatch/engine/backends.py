"""Choice of the runtime for a device: torch and C on a CPU, Triton kernels on a GPU."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import parse_lookahead, policy_class
from cbatch.engine.model_impl import Impl, refuse_together
from cbatch.engine.options import EngineOptions

if TYPE_CHECKING:
    import torch

    from cbatch.runtime.cpu.decoder import Model
    from cbatch.runtime.cpu.executor import TorchExecutor
    from cbatch.runtime.cpu.transformers_backend.model import TransformersModel
    from cbatch.runtime.drafting.contract import Drafter
    from cbatch.runtime.drafting.heads.head import Head
    from cbatch.runtime.drafting.lookup import Lookup
    from cbatch.runtime.gpu.decoder import Decoder
    from cbatch.runtime.gpu.executor import GpuExecutor
    from cbatch.runtime.gpu.memory import Draft
    from cbatch.runtime.gpu.modelling import ModellingDecoder
    from cbatch.runtime.rank_group import RankGroup
    from cbatch.runtime.sampling.structured import GrammarSource

    AnyModel = Model | TransformersModel | Decoder | ModellingDecoder | Head

_LEAST_CAPABILITY = (8, 0)  # the first with bf16 and asynchronous copies to shared memory
_logger = logging.getLogger("cbatch")


def is_gpu(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def usual_device(*, numerics: str, **options: Any) -> str:
    """Return the default device: "cuda" if torch sees a GPU that serves these `options` (those of
    `refuse_unserved`), else "cpu". Invariant numerics and transformers' modelling code default to
    the CPU, because they were only tried there."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    problem = problem_of_gpu()
    if problem is None and numerics == "invariant":
        problem = "numerics: 'invariant' was never tested on one; --device cuda uses it"
    if problem is None and options.get("impl", "own") != "own":
        problem = "this model's code was never tested on one; --device cuda uses it"
    if problem is None:
        try:
            refuse_unserved("cuda", **options)
            return "cuda"
        except FieldError as error:
            problem = f"{error.field}: {error.problem}"
    _logger.warning("the GPU that torch sees is not used: %s", problem)
    return "cpu"


def problem_of_gpu() -> str | None:
    """Return why the kernels cannot run on the GPU that torch sees, or None if they can."""
    import torch

    if torch.version.cuda is None:
        return "this torch was not built with CUDA"
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        capability = torch.cuda.get_device_capability()
    except RuntimeError as error:
        return f"it does not respond: {error}"
    if capability < _LEAST_CAPABILITY:
        return "its compute capability is {}.{}; kernels need {}.{}".format(
            *capability, *_LEAST_CAPABILITY
        )
    return None


def require_device(device: str) -> None:
    """Raise `FieldError` for a device name that is invalid, or a GPU that does not exist."""
    import torch

    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise FieldError("device", f"{device!r} is not supported", "use auto, cpu, cuda or cuda:1")
    if is_gpu(device):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            built = "" if torch.version.cuda else f" ({torch.__version__} is built without CUDA)"
            problem = f"{device!r} is not available: torch sees {count} GPUs{built}"
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
    """Load a model, or this rank's share. Raises the runtime's error naming file and field."""
    if impl == "transformers":
        return _load_modelling(device, path, dtype, numerics, random_weights_seed, ranks)
    if is_gpu(device):
        from cbatch.runtime.gpu.decoder import load_decoder

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
    """Load a model that transformers' modelling code computes."""
    settings: Any = {"dtype": dtype, "numerics": numerics, "random_weights_seed": seed}
    if is_gpu(device):
        from cbatch.runtime.gpu.modelling import load_modelling_decoder

        return load_modelling_decoder(path, device=device, **settings)
    from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model

    return load_transformers_model(path, ranks=ranks, **settings)


def executor_for(
    target: AnyModel,
    draft: AnyModel | None,
    config: SchedulerConfig,
    grammars: GrammarSource | None = None,
    kv_cache_dtype: str = "auto",
    default_params: SamplingParams | None = None,
) -> TorchExecutor | GpuExecutor:
    """Create the executor of a model. On a GPU this compiles the kernels that requests with
    `default_params` need, and captures graphs."""
    if is_gpu(str(target.device)):
        from cbatch.runtime.gpu.late import groups_of

        gpu_draft = cast("Draft | None", draft)
        decoder = cast("Decoder", target)
        executor = _gpu_executor(decoder, gpu_draft, config, grammars, kv_cache_dtype)
        executor.capture(groups_of(default_params or SamplingParams()))
        return executor
    from cbatch.runtime.cpu.executor import TorchExecutor

    return TorchExecutor(
        cast("Model", target),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        drafter=_drafter(cast("Model | Head | None", draft), config),
        grammars=grammars,
    )


def depth_for(device: str, overlap: Literal[0, 1] | None) -> int:
    """Return how many plans are made ahead of the running one. By default 1 on a GPU, which would
    idle while the host plans, and 0 on a CPU, where planning takes time from computing."""
    return int(is_gpu(device)) if overlap is None else overlap


def block_size_for(target: AnyModel, options: EngineOptions) -> int:
    """Return the tokens of a KV block: the option, or by default 16 on a CPU and 64 on a GPU, where
    attention reads such pages fastest."""
    return options.block_size or (64 if is_gpu(str(target.device)) else 16)


def refuse_unserved(
    device: str,
    *,
    block_size: int | None,
    kv_cache_dtype: str,
    head: Path | None = None,
    tensor_parallel_size: int = 1,
    impl: Impl = "own",
) -> None:
    """Raise `FieldError` for an option that this device cannot serve."""
    refuse_together(impl, head=head)
    if tensor_parallel_size > 1:
        _refuse_unshared(device, tensor_parallel_size)
    if not is_gpu(device):
        if kv_cache_dtype != "auto":
            problem = f"{kv_cache_dtype!r} is not supported on a CPU"
            raise FieldError("kv_cache_dtype", problem, "leave it out, or use --device cuda")
        return
    size = block_size
    if size is not None and (size < 16 or size & (size - 1)):
        raise FieldError(
            "block_size",
            f"{block_size!r} is not supported on a GPU",
            "use 16, 32, 64 or 128, or --device cpu",
        )


def _refuse_unshared(device: str, tensor_parallel_size: int) -> None:
    if is_gpu(device):
        problem = f"{tensor_parallel_size} ranks are supported on CPUs only"
        raise FieldError("tensor_parallel_size", problem, "use --device cpu, or leave it out")


def allowed_drafters(config: SchedulerConfig) -> tuple[str, ...]:
    """Return the drafters that requests may choose; none if speculation is off."""
    if not config.default_chain:
        return ()
    return DRAFTERS if config.draft_context_tokens is not None else LOOKUPS


def num_ranks(target: AnyModel) -> int:
    """Return the number of tensor-parallel ranks of a model, this process included."""
    group = getattr(target, "ranks", None)
    return 1 if group is None else cast("RankGroup", group).size


def code_of(target: AnyModel) -> str:
    """Return a description of the code that computes a model."""
    description: str | None = getattr(target, "code", None)
    return description or f"our own ({target.config.family})"


def row_invariance_of(target: AnyModel) -> tuple[bool, str]:
    """Return whether a model is batch-invariant, and a description of the answer."""
    if is_gpu(str(target.device)):
        decoder = cast("Decoder", target)
        if decoder.numerics != "invariant":
            return False, f"row_invariant: no (numerics={decoder.numerics}; products of a library)"
        holds = decoder.keeps_bits()
        reason = "" if holds else "; products on this device are not row-invariant"
        answer = "yes" if holds else "no"
        return holds, f"row_invariant: {answer} (numerics=invariant; fixed tiles{reason})"
    from cbatch.runtime.cpu.invariance import probe_row_invariance

    report = probe_row_invariance(cast("Model", target))
    return report.row_invariant, str(report)


def kv_dtype_of(model: AnyModel, kv_cache_dtype: str) -> torch.dtype:
    """Return the type of the KV cache. Raises `FieldError` for fp8 on a device without it."""
    if kv_cache_dtype == "auto":
        return model.dtype
    from cbatch.runtime.gpu.kv_types import fp8_for

    return fp8_for(cast("Decoder", model))


def gpu_step_bytes(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """Return the bytes of GPU memory that an executor needs without weights and KV cache."""
    from cbatch.engine.prices.startup import MOST_DRAFTS
    from cbatch.runtime.gpu.heads import GpuHead
    from cbatch.runtime.gpu.memory import StepLimits, step_memory_bytes

    lookahead = parse_lookahead(options.lookahead)
    drafts = 0 if lookahead.policy == "off" else max(lookahead.k, MOST_DRAFTS)
    limits = StepLimits(
        max_num_seqs=options.max_num_seqs,
        max_sequence_tokens=max_tokens,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        block_size=block_size_for(target, options),
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
    from cbatch.runtime.gpu.executor import GpuExecutor
    from cbatch.runtime.gpu.host_drafts import LookupSettings

    drafts = bool(config.default_chain) and config.lookahead.policy != "off"
    depths = [config.lookahead.k]
    if policy_class(config.lookahead.policy).priced:  # its prices are measured in these shapes
        depths += [shape.num_drafts for shape in shapes_for(config)]
    return GpuExecutor(
        target,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_sequence_tokens=config.max_sequence_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        draft=draft if drafts else None,
        max_drafts=max(depths) if drafts else 0,
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
    from cbatch.runtime.cpu.drafters.kinds import drafter_of
    from cbatch.runtime.drafting.chain import ChainDrafter
    from cbatch.runtime.drafting.lookup import LookupDrafter

    if not config.default_chain or config.lookahead.policy == "off":
        return None
    return ChainDrafter(
        model=None if draft is None else drafter_of(draft),
        lookups={name: LookupDrafter(lookup) for name, lookup in _lookups().items()},
        default=config.default_chain,
        model_price=config.catch_up_price,
    )
