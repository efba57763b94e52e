"""Loading of an engine's target and draft on their device, and start of other ranks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.engine.backends import is_gpu, load_for, refuse_unserved, require_device, usual_device
from cbatch.engine.heads import TrialTexts, take_head, trial_texts
from cbatch.engine.model_impl import Impl
from cbatch.engine.options import EngineOptions
from cbatch.engine.ranks.group import Ranks
from cbatch.engine.ranks.messages import LOADED, RankFiles
from cbatch.runtime.model.head_config import is_head
from cbatch.system.cpus import given_cpus
from cbatch.text import TextTokenizer

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel


class Loaded(NamedTuple):
    """Loaded models. With other `ranks`, `target` is rank 0's shard; the draft is never sharded."""

    device: str
    target: AnyModel
    draft: AnyModel | None
    ranks: Ranks | None


def load_models(
    opened: ExitStack,
    model: str | Path,
    draft: str | Path | None,
    draft_path: Path | None,
    options: EngineOptions,
    tokenizer: TextTokenizer | None,
    impls: tuple[Impl, Impl],
) -> Loaded:
    """Load the models of an engine, and start its other ranks, which `opened` will close.

    `impls` is the modelling code of model and draft. Raises `FieldError` if the device does not
    support the options.
    """
    requirements: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("block_size", "kv_cache_dtype", "tensor_parallel_size")
    }
    head = draft_path if draft_path is not None and is_head(draft_path) else None
    others = [impl for impl in impls if impl != "own"]
    requirements |= {"head": head, "impl": others[0] if others else "own"}
    device = options.device
    if device == "auto":
        device = usual_device(numerics=options.numerics, **requirements)
    refuse_unserved(device, **requirements)
    require_device(device)
    if not is_gpu(device):
        _set_num_threads(options)
    texts = () if head is None else _trial_texts(model, tokenizer)
    ranks = _start_ranks(model, draft if head is None else head, options, impls, texts)
    if ranks is not None:
        opened.callback(ranks.close)
    load = partial(
        load_for,
        device,
        dtype=options.dtype,
        numerics=options.numerics,
        random_weights_seed=options.random_weights_seed,
    )
    target = load(model, ranks=None if ranks is None else ranks.group, impl=impls[0])
    if head is not None:
        drafter: AnyModel | None = take_head(head, target, model, texts)
    else:
        drafter = None if draft is None else load(draft, impl=impls[1])
    if ranks is not None:
        ranks.hear(LOADED)
    return Loaded(device, target, drafter, ranks)


def _trial_texts(model: str | Path, tokenizer: TextTokenizer | None) -> TrialTexts:
    """Return the texts on which a head is tried, for the vocabulary of the model."""
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory

    return trial_texts(read_config(resolve_directory(model, weights=False)).vocab_size, tokenizer)


def _start_ranks(
    model: str | Path,
    draft: str | Path | None,
    options: EngineOptions,
    impls: tuple[Impl, Impl],
    texts: TrialTexts,
) -> Ranks | None:
    if options.tensor_parallel_size == 1:
        return None
    import torch

    _check_shards(model, impls[0], options.tensor_parallel_size)
    files = RankFiles(model, draft, impls, texts)
    return Ranks(options.tensor_parallel_size, files, options, torch.get_num_threads())


def _check_shards(model: str | Path, impl: Impl, size: int) -> None:
    """Raise an error if the model cannot be sharded over `size` ranks, before weights are read."""
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory

    path = resolve_directory(model, weights=False)
    if impl == "transformers":
        from cbatch.runtime.cpu.transformers_backend.sharing import check_shared

        return check_shared(path, size)
    from cbatch.runtime.model.sharding import shard_config

    shard_config(read_config(path), size)


def _set_num_threads(options: EngineOptions) -> None:
    """Set the number of torch's threads. By default a rank has its share of the CPUs, or fewer if
    torch's own number (`OMP_NUM_THREADS`) is lower."""
    import torch

    cpus_per_rank = max(1, given_cpus() // options.tensor_parallel_size)
    default = min(torch.get_num_threads(), cpus_per_rank)
    torch.set_num_threads(default if options.threads == "auto" else options.threads)
