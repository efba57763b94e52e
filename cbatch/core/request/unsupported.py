"""Refusal of options and fields of other engines that this engine does not support yet.

They are rejected by name, not ignored. The README's "Not yet" table lists the same features.
`cbatch.runtime.model.config` rejects unsupported models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch.core.request.errors import FieldError

# Engine options of other engines: the unsupported feature, by the option's name.
OPTIONS = {
    "adapter": "LoRA",
    "cpu_offload_gb": "KV offload",
    "enable_lora": "LoRA",
    "kv_offload_bytes": "KV offload",
    "limit_mm_per_prompt": "multimodal input",
    "lora_modules": "LoRA",
    "pipeline_parallel_size": "pipeline parallelism",
    "quantization": "quantised weights",
    "speculative_config": "drafters beyond `draft` (a model, EAGLE or Medusa heads) and `drafter`",
    "swap_space": "KV offload",
    "task": "embeddings",
}

# Request fields of other engines: the unsupported feature, and the values that do not use it.
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "bad_words": ("banning words", ([],)),
    "best_of": ("best_of", (1,)),  # the value of `n` is accepted, too
    "chat_template": ("a client's own template", ()),
    "continue_final_message": ("continuing a message", (False,)),
    "documents": ("documents", ([],)),
    "function_call": ("the older name of `tool_choice`", ("none",)),
    "functions": ("the older name of `tools`", ([],)),
    "images": ("multimodal input", ([],)),
    "lora_request": ("LoRA", ()),
    "mm_processor_kwargs": ("multimodal input", ({},)),
    "multi_modal_data": ("multimodal input", ({},)),
    "suffix": ("text after the completion", ("",)),
    "use_beam_search": ("beam search", (False,)),
}


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise `FieldError` for the first option that is in `OPTIONS`."""
    for name in options:
        if name in OPTIONS:
            raise _refusal(name, OPTIONS[name])


def without_neutral_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not in `FIELDS`. Raise `FieldError` if a field in `FIELDS` has a
    value that uses its feature."""
    supported: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            supported[name] = value
            continue
        feature, neutral = FIELDS[name]
        if name == "best_of":
            neutral = (*neutral, fields.get("n"))
        if value is not None and value not in neutral:
            raise _refusal(name, feature)
    return supported


def refuse_model_files(path: Path, field: str) -> None:
    """Raise `FieldError` for a directory with a LoRA adapter, or with GGUF files but no
    safetensors."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        for file in sorted(path.glob("*.gguf")):
            raise FieldError(field, f"{path} is a folder of GGUF files", f"name one, say {file}")
    if (path / "adapter_config.json").is_file():
        raise _refusal(field, f"LoRA ({path})", "merge the adapter into its model first")


def _refusal(field: str, feature: str, remedy: str = "leave it out") -> FieldError:
    return FieldError(field, f"{feature} is not supported yet", remedy)
