"""The shape of a model: the fields of its config.json that determine the cost of a step.

Covered are decoder-only transformers with gated MLPs and grouped-query attention, dense or with
mixtures of experts. Weights have 16 bits, or those of fp8, int8, GPTQ, AWQ and MXFP4 checkpoints.
Latent attention and other quantisations are refused by name.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError
from sim.workload.traces.files import read_whole

VALUE_BYTES = 2  # bf16
MXFP4_BITS = 4.25  # 4, and a scale of 8 for 32 weights
_SCALE_BITS = 16
_NOT_A_CONFIG = (ValueError, AttributeError, TypeError, LookupError, StopIteration, RecursionError)
_WITH_QK_NORMS = ("qwen3", "gemma3", "olmo2", "glm4_moe")
_GROUP = 128  # weights that share a scale, unless the config says otherwise


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's sizes. `num_experts` is 0 for a dense model; `dense_layers` of a mixture of experts
    have an MLP of `intermediate_size` instead."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 131072
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    model_type: str = ""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    shared_intermediate_size: int = 0  # of the experts that all tokens use
    dense_layers: int = 0
    weight_bits: float = 8 * VALUE_BYTES  # of the layers' matrices, with their scales
    has_8bit_products: bool = False  # activations are quantised to 8 bits, too
    kv_bytes: int = VALUE_BYTES  # of a key's or value's element
    recurrent_layers: int = 0  # of `num_hidden_layers`; the others have attention
    recurrent_weights: int = 0  # of one such layer, without its MLP
    state_values: int = 0  # of one such layer's state, fp32

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def has_qk_norms(self) -> bool:
        """True if a layer norms queries and keys, which takes two kernels more."""
        return self.model_type.startswith(_WITH_QK_NORMS)

    @property
    def expert_weights(self) -> int:
        """Return the number of weights in one expert of each layer that has experts."""
        layers = self.num_hidden_layers - self.dense_layers if self.num_experts else 0
        return 3 * layers * self.hidden_size * self.moe_intermediate_size

    @property
    def common_weights(self) -> int:
        """Return the number of weights in the layers' matrices that all tokens use."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        recurrent = self.recurrent_layers * self.recurrent_weights
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        dense = self.dense_layers if self.num_experts else layers
        widths = dense * self.intermediate_size + (layers - dense) * self.shared_intermediate_size
        routers = (layers - dense) * self.num_experts
        attention = self.attention_layers * heads * self.head_size
        return recurrent + hidden * (attention + 3 * widths + routers)

    @property
    def layer_weights(self) -> int:
        """Return the number of weights in the matrices of all layers."""
        return self.common_weights + self.num_experts * self.expert_weights

    @property
    def token_weights(self) -> int:
        """Return the number of the layers' weights that a token is multiplied with."""
        return self.common_weights + self.num_experts_per_tok * self.expert_weights

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> float:
        embeddings = self.head_weights * (1 if self.tie_word_embeddings else 2)
        return VALUE_BYTES * embeddings + self.weight_bits / 8 * self.layer_weights

    @property
    def kv_token_bytes(self) -> int:
        heads = 2 * self.num_key_value_heads
        return self.kv_bytes * self.attention_layers * heads * self.head_size

    @property
    def attention_layers(self) -> int:
        return self.num_hidden_layers - self.recurrent_layers

    @property
    def state_page_bytes(self) -> int:
        """Return the bytes of the states of all recurrent layers at one block boundary."""
        return 4 * self.recurrent_layers * self.state_values

    @property
    def mlp_size(self) -> int:
        """Return the intermediate size of all MLPs of a layer that a token uses."""
        if not self.num_experts:
            return self.intermediate_size
        return self.num_experts_per_tok * self.moe_intermediate_size + self.shared_intermediate_size

    @property
    def small_token_bytes(self) -> int:
        """Return the bytes that a layer's small kernels move for a token: two additions with norms,
        rotations, the write to KV, and the MLP's activation function."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        values = 8 * self.hidden_size + 2 * heads * self.head_size + 3 * self.mlp_size
        return VALUE_BYTES * values


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model. `model` is the name of a shipped shape, the path of a
    config.json, or its folder. Raises `FieldError`."""
    known = shipped("models.json")
    if model.lower() in known:
        return msgspec.convert(known[model.lower()], ModelShape)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        return _shape_of(json.loads(read_whole(path)), path)
    except FieldError:
        raise
    except (OSError, *_NOT_A_CONFIG) as error:
        raise FieldError(
            "--model",
            f"{model!r} is neither a known shape nor a config.json ({error})",
            f"name one of {', '.join(sorted(known))}, or the folder of a model",
        ) from error


def shipped(name: str) -> dict[str, Any]:
    text = resources.files("sim").joinpath("specs", name).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _shape_of(config: dict[str, Any], path: Path) -> ModelShape:
    config |= config.get("text_config", {})  # of a model that also sees images
    if config.get("kv_lora_rank"):
        remedy = "give a model with grouped-query attention"
        raise FieldError("--model", f"{path}: kv_lora_rank: latent attention", remedy)
    fields = {"num_key_value_heads": config.get("num_attention_heads"), **config}
    count = next((n for name in _COUNTS if (n := config.get(name))), 0)
    if count:
        width = config.get("moe_intermediate_size") or config.get("intermediate_size")
        shared = config.get("shared_expert_intermediate_size")
        shared = shared or (config.get("n_shared_experts") or 0) * width
        dense = config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
        fields |= {"num_experts": count, "moe_intermediate_size": width, "dense_layers": dense}
        fields |= {"shared_intermediate_size": shared}
    if kinds := [kind for kind in config.get("layer_types") or () if kind in _RECURRENT]:
        fields |= {"recurrent_layers": len(kinds)} | _recurrent(config, kinds[0])
    if given := config.get("quantization_config"):
        fields["weight_bits"], fields["has_8bit_products"] = _quantised(given, path)
    return msgspec.convert(fields, ModelShape)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT = ("linear_attention", "conv", "mamba")  # in `layer_types`


def _recurrent(config: dict[str, Any], kind: str) -> dict[str, int]:
    """Return the weights and the state of a gated delta rule, a short convolution or Mamba-2."""
    hidden = config["hidden_size"]
    if kind == "conv":
        values = hidden * (config["conv_L_cache"] - 1)
        return {"recurrent_weights": 4 * hidden**2, "state_values": values}
    prefix = "mamba" if "mamba_n_heads" in config else "linear"
    names = {"linear": _DELTA_FIELDS, "mamba": _MAMBA_FIELDS}[prefix]
    keys, key_dim, heads, dim, kernel = (config[f"{prefix}_{name}"] for name in names)
    channels = 2 * keys * key_dim + heads * dim
    rows = channels + 2 * heads * dim + heads  # the output's projection, too
    values = heads * key_dim * dim + (kernel - 1) * channels
    return {"recurrent_weights": hidden * rows, "state_values": values}


_DELTA_FIELDS = (
    *("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim"),
)
_MAMBA_FIELDS = ("n_groups", "d_state", "n_heads", "d_head", "d_conv")


def _quantised(given: dict[str, Any], path: Path) -> tuple[float, bool]:
    """Return the bits of a weight with its share of a scale, and whether products have 8 bits."""
    method = str(given.get("quant_method"))
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, True
    if method == "mxfp4":
        return MXFP4_BITS, False
    weights, activations = given, None
    if method == "compressed-tensors":
        group = next(iter(given["config_groups"].values()))
        weights, activations = group["weights"], group.get("input_activations")
    elif method not in ("gptq", "awq"):
        remedy = "give 16-bit, fp8, compressed-tensors, gptq, awq or mxfp4 weights"
        raise FieldError("--model", f"{path}: quantization_config: {method!r} is unknown", remedy)
    bits = int(weights["num_bits" if method == "compressed-tensors" else "bits"])
    group_size = weights.get("group_size") or _GROUP
    scales = (_SCALE_BITS + bits) / group_size if group_size > 0 and bits < 8 else 0.0
    return bits + scales, bits == 8 and bool(activations)
