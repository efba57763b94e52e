"""A trained head as files: the layout of speculators, which vLLM reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cbatch.training.eagle_net import EagleNet


def save_eagle3(
    net: EagleNet,
    layers: tuple[int, ...],
    folder: Path,
    *,
    model: str,
    drafts: int,
    with_head: bool,
) -> None:
    """`layers` are those that it reads. Without its rows of the target's head the file is smaller,
    and who loads it takes those of the target; vLLM wants them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in net.state_dict().items()
    }
    ids, vocab = net.draft_ids, net.parts.config.vocab_size
    if with_head:
        tensors["lm_head.weight"] = net.rows.to(torch.bfloat16).contiguous()
    if len(ids) < vocab:
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    part = folder / "model.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
    text = json.dumps(_config(net, layers, model, drafts), indent=2)
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
