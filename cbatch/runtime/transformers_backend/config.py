"""The config of a transformers model in our form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.runtime.model.config import ModelConfig, ModelError, eos_ids_of
from cbatch.runtime.model.records import LayerRecord
from cbatch.runtime.transformers_backend.step import AttentionLayer

_CHANGING_ROPES = ("dynamic", "longrope")  # angles depend on the longest sequence of a step


def bridge(config: Any, path: Path, layers: list[AttentionLayer], vocab_size: int) -> ModelConfig:
    """Return the config of a model with the attention `layers` of a probe. Raises ModelError for a
    config without a context length."""
    records = [LayerRecord(each.mixer, None) for each in layers]
    return ModelConfig(
        family=str(config.model_type),
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        max_position_tokens=_context_tokens(config, path, layers),
        layers=tuple(records),
        norm=None,
        eos_token_ids=eos_ids_of(path),
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
    )


def _context_tokens(config: Any, path: Path, layers: list[AttentionLayer]) -> int:
    """Return the longest context for which our results equal the model's. It is limited by the
    chunk of chunked attention, by a window that the modelling code applies only in its masks, and
    by the length at which rotary angles change."""
    tokens = getattr(config, "max_position_embeddings", None)
    if not isinstance(tokens, int) or tokens < 2:
        raise ModelError(f"{path}: max_position_embeddings: missing; it gives the context")
    limits = [tokens]
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds:
        limits.append(config.attention_chunk_size)
    window: Any = getattr(config, "sliding_window", None)
    masked = window and getattr(config, "use_sliding_window", True)
    if masked and all(layer.mixer.window is None for layer in layers):
        limits.append(window)
    for rope in _ropes(config):
        if rope.get("rope_type") in _CHANGING_ROPES:
            limits.append(rope.get("original_max_position_embeddings") or tokens)
    return min(limits)


def changes_angles(config: Any) -> bool:
    """Return whether rotary angles depend on the longest sequence of a step."""
    return any(rope.get("rope_type") in _CHANGING_ROPES for rope in _ropes(config))


def _ropes(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]
