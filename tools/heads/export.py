"""Save and load trained heads in formats that cbatch and vLLM read: EAGLE-3 in the layout of
speculators, Medusa in vLLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.heads.eagle_net import EagleNet, EagleShape
from tools.heads.medusa_net import MedusaNet
from tools.heads.target_parts import TargetParts


def save_eagle3(
    net: EagleNet,
    layers: tuple[int, ...],
    folder: Path,
    *,
    model: str,
    drafts: int,
    with_head: bool,
) -> None:
    """Save a head that reads the hidden states of `layers`. Without the LM head's rows the file is
    smaller, and cbatch takes the target's rows; vLLM needs them in the file."""
    tensors = _tensors(net, with_head=with_head)
    ids, vocab = net.draft_ids, net.parts.config.vocab_size
    if len(ids) < vocab:
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    _write(folder, tensors, _config(net, layers, model, drafts))


def load_eagle3(folder: Path, parts: TargetParts, draft_ids: Tensor | None = None) -> EagleNet:
    """Load a file of `save_eagle3` to continue its training, optionally with other `draft_ids`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layer, tensors = config["transformer_layer_config"], load_file(folder / "model.safetensors")
    shape = EagleShape(
        hidden_size=layer["hidden_size"],
        num_layers_read=len(config["eagle_aux_hidden_state_layer_ids"]),
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        intermediate_size=layer["intermediate_size"],
        rms_norm_eps=layer["rms_norm_eps"],
        rope_theta=layer["rope_theta"],
    )
    ids = torch.arange(config["draft_vocab_size"])
    ids = ids + tensors.pop("d2t", torch.zeros_like(ids))
    net = EagleNet(shape, parts, ids if draft_ids is None else draft_ids)
    weights = {name: tensors[name].float() for name in net.state_dict()}
    net.load_state_dict(weights)
    return net


def save_medusa(net: MedusaNet, folder: Path, *, with_head: bool) -> None:
    """Save Medusa heads, like `save_eagle3`. The config has `num_heads` and `num_hidden_layers`,
    because vLLM looks for either. vLLM 0.32 refuses files with a token map."""
    tensors = _tensors(net, with_head=with_head)
    ids, target = net.draft_ids, net.parts.config
    if len(ids) < target.vocab_size:
        tensors["token_map"] = ids
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": len(ids),
        "num_heads": len(net.blocks),
        "num_hidden_layers": net.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }
    _write(folder, tensors, config)


def load_medusa(folder: Path, parts: TargetParts) -> MedusaNet:
    """Load a file of `save_medusa`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    ids = tensors.get("token_map", torch.arange(config["vocab_size"]))
    sizes = {"heads": config["num_heads"], "num_blocks": config["num_hidden_layers"]}
    net = MedusaNet(parts, ids, **sizes)
    net.load_state_dict({name: tensors[name].float() for name in net.state_dict()})
    return net


def _tensors(net: EagleNet | MedusaNet, *, with_head: bool) -> dict[str, Tensor]:
    tensors = dict(net.state_dict())
    if with_head:
        tensors["lm_head.weight"] = net.head_rows
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights and config. A reader never sees half of the weights: their file is renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
    text = json.dumps(config, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _config(net: EagleNet, layers: tuple[int, ...], model: str, drafts: int) -> dict[str, Any]:
    shape, target = net.shape, net.parts.config
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": model, "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": len(net.draft_ids),
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "transformer_layer_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate_size,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_tokens,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        },
        "torch_dtype": "bfloat16",
    }
