"""The pair as it ships: Hugging Face folders with bf16 safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_pair.nets import Llama, NetConfig
from tools.demo_pair.tokenizer import END_OF_TEXT, save_tokenizer


def save_pretrained(net: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, model.safetensors (bf16, tied head left out) and the tokenizer."""
    save_tokenizer(tokenizer, folder)
    config = net.config.to_hf(tokenizer.token_to_id(END_OF_TEXT))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in net.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_pretrained(folder: Path) -> Llama:
    """Return the stored net in fp32, with the bf16 values that the engine serves."""
    net = Llama(NetConfig.from_hf(folder / "config.json"))
    weights = load_file(folder / "model.safetensors")
    net.load_state_dict({name: value.float() for name, value in weights.items()})
    return net.eval()
