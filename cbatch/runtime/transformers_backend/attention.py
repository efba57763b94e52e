"""The attention function that transformers calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.records import Attention
from cbatch.runtime.transformers_backend.step import LAYER, AttentionLayer, Pass

NAME = "cbatch"  # the name of our implementation in transformers
# Arguments that modelling code passes on and that do not affect attention.
_NEUTRAL = {
    *("cache", "cache_position", "is_causal", "layer_idx", "logits_to_keep", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings"),
    *("position_ids", "return_dict", "use_cache"),
}


def register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for a ragged batch: query [1, H, T, Dk], key and value [1, Hkv, T, ...] -> [1, T, H,
    Dv]."""
    layer: AttentionLayer | None = getattr(module, LAYER, None)
    if layer is None or layer.owner.registered is not None:
        return register_layer(module, query, key, value, attention_mask, options), None
    step = layer.owner
    assert step.step is not None, "attention outside of a pass"
    out = step.step.compute(layer, query[0], key[0], value[0])
    if step.progress is not None:
        step.progress[0] += 1
    return out[None].to(query.dtype), None


_registering: list[Pass] = []


class registering:
    """A context in which the attention layers that run are registered with `step`."""

    def __init__(self, step: Pass) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._step.registered = []
        _registering.append(self._step)

    def __exit__(self, *_: object) -> None:
        _registering.remove(self._step)
        self._step.registered = None


@torch.inference_mode()
def probe(
    path: Path, net: nn.Module, step: Pass, run: Callable[[], Tensor]
) -> tuple[list[AttentionLayer], int]:
    """Return the attention layers that `run` calls, and the number of logits per row. `run` is a
    pass over one token. Raises ModelError, naming `path`, for a model that we cannot compute."""
    name = type(net).__name__
    with registering(step):
        try:
            logits = run()
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        except Exception as error:  # modelling code may raise anything
            problem = f"{type(error).__name__}: {error!s:.200}"
            raise ModelError(f"{path}: {name} cannot compute a ragged batch: {problem}") from error
    if not step.layers:
        raise ModelError(f"{path}: {name} does not use transformers' attention interface")
    return step.layers, logits.shape[-1]


def register_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Register a layer and return zeros. Raises ModelError for options that our attention does not
    support."""
    (step,) = _registering
    assert step.registered is not None
    name = type(module).__name__
    if any(module is other for other in step.registered):
        raise ModelError(f"{name}: one attention module serves two layers")
    if mask is not None:
        raise ModelError(f"{name}: passes its own attention mask")
    known = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
    for field, option in options.items():
        if field not in known | _NEUTRAL and option is not None:
            raise ModelError(f"{name}: needs {field} of attention, which is not supported")
    scale, sinks = options.get("scaling"), options.get("s_aux")
    layer = AttentionLayer(
        index=len(step.layers),
        owner=step,
        mixer=Attention(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scale is None else scale),
            window=options.get("sliding_window") or None,
            soft_cap=options.get("softcap") or 0.0,
            sinks=sinks is not None,
        ),
        sinks=None if sinks is None else sinks.detach().float().reshape(-1).contiguous(),
    )
    step.layers.append(layer)
    step.registered.append(module)
    object.__setattr__(module, LAYER, layer)
    return torch.zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3]).to(query)
