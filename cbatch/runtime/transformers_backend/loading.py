"""Loading of a model by transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cbatch.runtime.model.checkpoint import UNTIED, resolve_directory, resolve_dtype, warn_unread
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.transformers_backend.support import refuse_unknown_rope, refuse_unsupported


def load_net(
    path_or_name: str | Path, dtype: str | torch.dtype, seed: int | None
) -> tuple[nn.Module, Path, torch.dtype]:
    """Return the model as loaded by transformers, on the CPU; its directory; and the dtype to serve
    it in. Raises ModelError as `load_transformers_model` does."""
    path = resolve_directory(path_or_name, weights=seed is None)
    refuse_unsupported(path)
    with quiet():
        net, served = _load(path, dtype, seed)
    return net, path, served


def _load(path: Path, dtype: str | torch.dtype, seed: int | None) -> tuple[nn.Module, torch.dtype]:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        config = AutoConfig.from_pretrained(path)
        stored = config.dtype
        served = resolve_dtype(dtype, None if stored is None else str(stored).split(".")[-1])
        with torch.inference_mode(False), torch.no_grad():
            if seed is None:
                options |= {"use_safetensors": True, "output_loading_info": True, "config": config}
                net, report = AutoModelForCausalLM.from_pretrained(path, dtype=served, **options)
                _report_tensors(path, net, report)
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    net = AutoModelForCausalLM.from_config(config, dtype=served, **options)
    except ModelError:
        raise
    except Exception as error:  # there are many kinds
        refuse_unknown_rope(path)
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: transformers cannot load it: {message:.300}") from error
    return net.eval().requires_grad_(False), served


def _report_tensors(path: Path, net: Any, report: dict[str, Any]) -> None:
    """Log tensors of the checkpoint that no parameter uses. Raise ModelError for missing tensors,
    which transformers would initialise at random."""
    for name in sorted(report["missing_keys"]):
        raise ModelError(
            f"{path}: tensor {name} is missing; does config.json belong to this model?"
        )
    warn_unread(path, report["unexpected_keys"])
    head, tied = net.get_output_embeddings(), getattr(net.config, "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not net.get_input_embeddings().weight:
        logging.getLogger("cbatch").warning(UNTIED, path)


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off the progress bars and hints of transformers."""
    from transformers.utils import logging as hf_logging

    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
