"""The interface of a device, which the `backend.py` of each kind of device implements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor
from cbatch.runtime.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from cbatch.runtime.rank_group import RankGroup
    from cbatch.runtime.sampling.structured import GrammarSource

# The modelling code of a model: our decoder for any device, our decoder for CPUs (for models that
# are not `plain`), or the code of the transformers library.
Impl = Literal["own", "compiled", "transformers"]
TrialTexts = tuple[tuple[int, ...], ...]  # token ids of the texts on which a head is tested


class Requirements(NamedTuple):
    """Options of an engine that a device may not support. `impls`: the modelling code of the model
    and of its draft."""

    model: str | Path
    impls: tuple[Impl, Impl] = ("own", "own")
    numerics: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel_size: int = 1


class LoadRequest(msgspec.Struct, frozen=True):
    """The models to load. `impls`: the modelling code of the model and of the draft. `trial_texts`
    is empty unless the draft is a head. With `head_is_optional`, no option names the head."""

    device: str
    model: str | Path
    draft: str | Path | None
    impls: tuple[Impl, Impl]
    trial_texts: TrialTexts
    dtype: str
    numerics: str
    kv_cache_dtype: str
    random_weights_seed: int | None
    head_is_optional: bool = False


class LargestStep(NamedTuple):
    """Maximum sizes of an executor's steps. `max_drafts` is per row; 0 means no speculation."""

    max_num_seqs: int
    max_sequence_tokens: int
    max_num_batched_tokens: int
    block_size: int
    max_drafts: int


class ModelFacts(Protocol):
    """A loaded model or head. `matrix_bytes` is the size of its matrices in bytes; None means that
    all of them have the type `dtype`."""

    config: ModelConfig
    dtype: torch.dtype
    numerics: str

    @property
    def device(self) -> torch.device: ...

    @property
    def matrix_bytes(self) -> int | None: ...


class LoadedModels(Protocol):
    """A target and its draft (a model or a head) on a device. `num_ranks` ranks share the target,
    and each has the whole draft. `code` describes the modelling code of the target."""

    @property
    def target(self) -> ModelFacts: ...

    @property
    def draft(self) -> ModelFacts | None: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def code(self) -> str: ...

    @property
    def price_key(self) -> dict[str, object]:
        """Return facts that step durations depend on, in addition to models and options."""
        ...

    def kv_block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens, summed over all ranks."""
        ...

    def state_bytes(self, block_size: int, max_drafts: int) -> tuple[int, int]:
        """Return the bytes of a state page, and of what the tokens of one slot add to a state; 0
        without recurrent layers."""
        ...

    def kv_memory_bytes(self, step: LargestStep, share: float | None, weight_bytes: int) -> int:
        """Return the memory for KV in bytes: a `share` of the device's memory minus weights and
        buffers of the `step`; None: a default. Raises `FieldError` if no memory is left for KV."""
        ...

    def batch_invariance(self) -> tuple[bool, str]:
        """Return whether the target is batch-invariant, and a description of the answer. All ranks
        must call it."""
        ...

    def executor(
        self,
        config: SchedulerConfig,
        max_drafts: int,
        grammars: GrammarSource | None = None,
        default_params: SamplingParams | None = None,
    ) -> Executor:
        """Create the executor, ready for requests with `default_params`. A row has at most
        `max_drafts` drafts in a step; 0: no speculation."""
        ...


class Backend(Protocol):
    """A kind of device. Its libraries are imported when it loads a model, not before."""

    default_block_size: int
    default_overlap: Literal[0, 1]  # number of steps planned while an earlier step runs

    def may_auto_select(self, needs: Requirements) -> bool:
        """Return whether `device` "auto" may select this kind. Logs why it may not."""
        ...

    def require_device(self, device: str) -> None:
        """Raise `FieldError` for a device that this machine does not have."""
        ...

    def check_supported(self, needs: Requirements) -> None:
        """Raise `FieldError` for an option that this kind of device does not support."""
        ...

    def why_not_compiled(self, config: ModelConfig, num_ranks: int) -> str | None:
        """Return why our own pass cannot compute a model that is not plain; None if it can."""
        ...

    def set_threads(self, threads: int | Literal["auto"], num_ranks: int) -> None:
        """Set the number of threads of this process."""
        ...

    def load(self, request: LoadRequest, ranks: RankGroup | None = None) -> LoadedModels:
        """Load this rank's shard of the target, and the draft. Raises ModelError naming file and
        field, and FieldError for a head that does not predict the target."""
        ...
