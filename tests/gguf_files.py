"""GGUF files for tests, as bytes; the package gguf writes them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gguf

from bench.peers.gguf_converter import convert
from bench.peers.gguf_files import BF16, F16, F32, Q8_0, Stored, stored, write_gguf

__all__ = ["BF16", "F16", "F32", "Q8_0", "Stored", "convert", "gguf_bytes", "stored", "write_gguf"]


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, Stored], version: int = 3, alignment: int = 32
) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        write_gguf(path, metadata, tensors, alignment)
        content = path.read_bytes()
    return content[:4] + version.to_bytes(4, "little") + content[8:]


def original_names(num_layers: int = 1) -> dict[str, str]:
    """Return the Hugging Face name of each GGUF tensor of a Llama without biases."""
    names: dict[str, str] = {}
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers).mapping
    for name, (_, short) in mapping.items():
        if name.startswith(("model.", "lm_head")):  # of several, the first is Hugging Face's
            names.setdefault(f"{short}.weight", f"{name}.weight")
    return names
