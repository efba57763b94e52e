"""The `config.json` of a head: a small drafter that reads the hidden states of the target.

Known layouts: EAGLE-3 as written by SafeAILab, SpecForge and SGLang, AngelSlim and speculators;
EAGLE-1 and 2 (whose files are the same); Medusa as written by FasterDecoding, TGI and vLLM.
Frameworks read some fields differently. `_readings` lists the possible meanings, the likeliest
first. A model's own head for multi-token prediction (MTP) has no config: see `mtp_head`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from safetensors import SafetensorError, safe_open

from cbatch.runtime.model.config import Fields, ModelConfig, read_json_object
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.records import Attention, LayerRecord, Norm, PairInput

if TYPE_CHECKING:
    from cbatch.runtime.model.head_weights import HeadWeights

_EAGLE3 = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
_EAGLE1 = ("EagleLlamaForCausalLM", "EAGLELlamaForCausalLM", "EagleModel")
_MEDUSA = ("MedusaModel", "MedusaForCausalLM")
_UNSUPPORTED = ("peagle", "dflash", "dflash2", "dspark", "mtp", "mlp_speculator")
_FC_NAMES = {"fc.weight", "model.fc.weight", "draft_model.fc.weight"}
_HEAD_FIELDS = (
    *("speculators_model_type", "eagle_config", "draft_vocab_size", "eagle_fc_bias"),
    "medusa_num_heads",
)


class HeadConfig(msgspec.Struct, frozen=True):
    """One reading of a head's config. `layer` describes the single layer of an EAGLE head; for
    Medusa it has no layer, only the target's vocabulary. `hidden_layers` are the target's layers
    whose states the head reads, numbered as in `Model.keep_hidden`."""

    kind: Literal["eagle3", "eagle", "medusa", "mtp"]
    layer: ModelConfig
    hidden_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_output: bool = False
    input_norm: bool = False  # one norm over all states that are read, before fc
    fc_norm: bool = False  # one norm for each layer's states
    fc_bias: bool = False
    # Medusa: the number of heads, residual blocks per head, and whether all share an output matrix.
    num_heads: int = 1
    num_blocks: int = 1
    shares_head: bool = False

    @property
    def eps(self) -> float:
        """The epsilon of all norms."""
        norm = self.layer.norm or self.layer.feed_forward.norm
        assert norm is not None
        return norm.eps

    @property
    def normed_residual(self) -> bool:
        return self.layer.input is not None and self.layer.input.normed_residual

    def __str__(self) -> str:
        if self.kind == "medusa":
            return f"{self.num_heads} medusa heads"
        layers = ", ".join(map(str, self.hidden_layers))
        residual = ", normed residual" if self.normed_residual else ""
        return f"{self.kind} head that reads the inputs of layers {layers}{residual}"


def is_head(path: Path) -> bool:
    """Return whether a directory's configuration is that of a head."""
    file = path / "config.json"
    if not path.is_dir() or not file.exists():
        return False
    values = read_json_object(file)
    names = values.get("architectures")
    known = (*_EAGLE3, *_EAGLE1, *_MEDUSA)
    named = isinstance(names, list) and any(str(name) in known for name in names)
    typed = values.get("model_type") in ("eagle", "medusa")
    if named or typed or any(values.get(field) is not None for field in _HEAD_FIELDS):
        return True
    return values.get("num_hidden_layers") == 1 and _has_fc(path)


def _has_fc(path: Path) -> bool:
    """Return whether a directory has the tensor `fc`. An EAGLE-1 config looks like that of a Llama
    with one layer, but only a head has `fc`. Safetensors names are read without importing torch."""
    for file in sorted(path.glob("*.safetensors"))[:1]:
        with contextlib.suppress(SafetensorError, OSError), safe_open(file, "numpy") as tensors:
            return not _FC_NAMES.isdisjoint(tensors.keys())
    from cbatch.runtime.model.head_weights import HeadWeights, weight_files

    return bool(weight_files(path)) and "fc.weight" in HeadWeights.of(path).names


def read_head(path: Path, target: ModelConfig) -> list[HeadConfig]:
    """Return the readings of a head's config, the likeliest first. Raises ModelError naming file
    and field for anything that is not supported, or that does not fit the target."""
    from cbatch.runtime.model.head_weights import HeadWeights

    file = path / "config.json"
    values = read_json_object(file)
    f = Fields(file, values)
    algorithm = values.get("speculators_model_type")
    if algorithm in _UNSUPPORTED:
        problem = f"{algorithm} heads are not supported; use EAGLE-1 to 3 or Medusa"
        raise f.error("speculators_model_type", problem)
    weights = HeadWeights.of(path)
    typed, named = values.get("model_type") == "medusa", values.get("architectures") or ()
    if typed or values.get("medusa_num_heads") is not None or set(named) & set(_MEDUSA):
        return [_medusa(f, weights, target)]
    names = weights.names
    eagle3 = (
        "lm_head.weight" in names or "d2t" in names or algorithm == "eagle3" or _fc_norms(names)
    )
    inner = values.get("transformer_layer_config", values.get("model", values))
    if not isinstance(inner, dict):
        raise f.error("transformer_layer_config", f"must be an object, got {inner!r:.40}")
    layer = _layer(f, inner, target, weights)
    layer = head_layer(layer, "eagle3" if eagle3 else "eagle")
    if not eagle3:
        bias = "fc.bias" in names
        return [HeadConfig("eagle", layer, (target.num_layers,), target.vocab_size, fc_bias=bias)]
    config = HeadConfig(
        kind="eagle3",
        layer=layer,
        hidden_layers=(),
        draft_vocab_size=_draft_vocab(f, target),
        norm_output=f.flag("norm_output", False) and algorithm is not None,
        input_norm="input_norm.weight" in names,
        fc_norm="fc_norm.0.weight" in names,
    )
    return _readings(config, f, target)


def head_layer(layer: ModelConfig, kind: str) -> ModelConfig:
    """Return the records of an EAGLE head from those of a Llama with one layer."""
    assert layer.norm is not None
    eps, layer = layer.norm.eps, layer.with_mixers(norm=None)
    if kind == "eagle":
        return msgspec.structs.replace(layer, norm=None, input=PairInput(fused=True))
    pair = PairInput(False, Norm("input_layernorm", eps), Norm("hidden_norm", eps))
    return msgspec.structs.replace(layer, input=pair)


def mtp_head(target: ModelConfig) -> HeadConfig:
    """Return the config of the MTP head in a checkpoint of Qwen3.5 or Qwen3-Next: EAGLE-1 with
    norms, whose layer is the target's first with attention."""
    norm, layers = target.norm, [each for each in target.layers if _attends(each)]
    assert norm is not None
    token_norm, state_norm = (
        msgspec.structs.replace(norm, name=f"pre_fc_norm_{each}")
        for each in ("embedding", "hidden")
    )
    pair = PairInput(True, token_norm, state_norm)
    layer = msgspec.structs.replace(target, layers=(layers[0],), input=pair)
    hidden_layers = (target.num_layers,)
    return HeadConfig("mtp", layer, hidden_layers, target.vocab_size, norm_output=True)


def _attends(layer: LayerRecord) -> bool:
    return isinstance(layer.mixer, Attention)


def _fc_norms(names: frozenset[str]) -> bool:
    return "fc_norm.0.weight" in names or any("hidden_norm" in name for name in names)


def _layer(
    f: Fields, inner: Mapping[str, Any], target: ModelConfig, weights: HeadWeights
) -> ModelConfig:
    """Parse the head's layer. Sizes that configs often get wrong come from the tensors instead."""
    values = dict(inner)
    if values.get("num_hidden_layers", 1) != 1:
        count = values["num_hidden_layers"]
        raise f.error(
            "num_hidden_layers", f"{count!r:.40} layers are not supported; use a head of 1"
        )
    vocabulary = values.get("vocab_size", target.vocab_size)
    if vocabulary != target.vocab_size:
        problem = f"{vocabulary!r:.40} is not the target's vocabulary of {target.vocab_size}"
        raise f.error("vocab_size", f"{problem}; use a head that was trained for this model")
    values |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    values |= {"vocab_size": target.vocab_size, "torch_dtype": None, "dtype": None}
    values.setdefault("max_position_embeddings", target.max_position_tokens)
    heads = values.get("num_attention_heads")
    rows = weights.shape_of("layers.0.self_attn.q_proj.weight")
    if isinstance(heads, int) and heads > 0 and rows and rows[0] % heads == 0:
        values["head_dim"] = rows[0] // heads
    layer = parse_config(values, f.path)
    if not layer.plain:
        activation = layer.feed_forward.activation
        problem = f"{activation} is not supported; supported: silu"
        raise f.error("hidden_act", problem)
    assert layer.norm is not None
    norms = "layers.0.self_attn.q_norm.weight" in weights.names
    layer = layer.with_mixers(
        qk_norm=Norm("norm", layer.norm.eps) if norms else None,
        bias="layers.0.self_attn.q_proj.bias" in weights.names,
        out_bias=False,
    ).with_feed_forwards(bias=False)
    context = min(layer.max_position_tokens, target.max_position_tokens)
    return msgspec.structs.replace(
        layer,
        # A head's config often has its training length; rotary positions are relative.
        max_position_tokens=max(context, min(target.max_position_tokens, 2048)),
    )


def _medusa(f: Fields, weights: HeadWeights, target: ModelConfig) -> HeadConfig:
    """Parse a Medusa config. The number of heads is that of the tensors: configs often state fewer.
    In the config of a whole model, the number of layers is the model's, not the head's."""
    is_medusa = f.get("model_type") == "medusa"
    for field in ("hidden_size", "vocab_size"):
        size, expected = f.get(field), getattr(target, field)
        if size is not None and size != expected:
            problem = f"{size!r:.40} is not the target's {expected}"
            raise f.error(field, f"{problem}; use heads that were trained for this model")
    block_names = [re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.weight", n) for n in weights.names]
    block_numbers = [(int(each[1]), int(each[2])) for each in block_names if each]
    heads, blocks = (1 + max((each[i] for each in block_numbers), default=0) for i in range(2))
    weights.require("blocks.0.layers.0.weight", (target.hidden_size, target.hidden_size))
    field = "num_heads" if is_medusa and f.get("num_heads") else "medusa_num_heads"
    stated = f.integer(field, heads)
    if stated > heads:
        problem = f"{stated}, the tensors have {heads}; the download may be cut"
        raise f.error("medusa_num_heads", problem)
    field = "num_hidden_layers" if is_medusa and f.get("num_hidden_layers") else "medusa_num_layers"
    if f.integer(field, blocks) != blocks:
        problem = f"{f.get(field)}, the tensors have {blocks}; use the file's own config.json"
        raise f.error(field, problem)
    return HeadConfig(
        kind="medusa",
        layer=msgspec.structs.replace(target, layers=()),
        hidden_layers=(target.num_layers,),
        draft_vocab_size=_draft_vocab(f, target, "truncated_vocab_size"),
        num_heads=heads,
        num_blocks=blocks,
        shares_head=f.flag("original_lm_head", False),
    )


def _draft_vocab(f: Fields, target: ModelConfig, field: str = "draft_vocab_size") -> int:
    size = f.integer(field, target.vocab_size)
    if size > target.vocab_size:
        problem = f"{size} is more than the target's vocabulary of {target.vocab_size}"
        raise f.error(field, f"{problem}; use a head that was trained for this model")
    return size


def _readings(config: HeadConfig, f: Fields, target: ModelConfig) -> list[HeadConfig]:
    """Return the possible readings. A layer id means the state before the layer (vLLM, speculators)
    or after it (SGLang). Frameworks have different defaults of `norm_before_residual`."""
    count = target.num_layers
    eagle = f.get("eagle_config", {})
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    if layers is None:
        layers = f.get("eagle_aux_hidden_state_layer_ids")
        by_sglang = False
    else:
        by_sglang = f.get("speculators_model_type") is None
    if layers is None:
        ids = [(2, count // 2, count - 3)]
    elif not isinstance(layers, list) or not layers or not all(isinstance(i, int) for i in layers):
        field = "eagle_aux_hidden_state_layer_ids"
        raise f.error(field, f"must be a list of layer numbers, got {layers!r:.40}")
    else:
        before, after = tuple(layers), tuple(i + 1 for i in layers)
        ids = [after, before] if by_sglang else [before, after]
    fits = [each for each in ids if all(0 <= i <= count for i in each)]
    if not fits:
        field, problem = "eagle_aux_hidden_state_layer_ids", f"{list(ids[0])} of {count} layers"
        raise f.error(field, f"{problem}; use a head that was trained for this model")
    stated = f.flag("norm_before_residual", False)
    residual = [stated] if f.get("norm_before_residual") is not None else [False, True]
    replace, layer, pair = msgspec.structs.replace, config.layer, config.layer.input
    assert pair is not None
    return [
        replace(
            config,
            hidden_layers=each,
            layer=replace(layer, input=replace(pair, normed_residual=normed)),
        )
        for normed in residual
        for each in fits
    ]
