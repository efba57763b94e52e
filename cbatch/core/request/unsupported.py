"""What other engines offer and this one does not yet, refused by name rather than ignored.

The README's "Not yet" table tells the same; model files are refused by
`cbatch.runtime.model.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch.core.request.errors import FieldError

# Options of an engine, by the names they have elsewhere.
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
    "tensor_parallel_size": "another name of `tensor_parallel`",
}

# Fields of a request, and the values of each that ask for nothing.
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "bad_words": ("banning words", ([],)),
    "best_of": ("best_of", (1,)),  # and as many as `n`
    "chat_template": ("a template of the client's own", ()),
    "continue_final_message": ("going on with a message", (False,)),
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
    """Raises `FieldError` for the first option that asks for something of `OPTIONS`."""
    for name in options:
        if name in OPTIONS:
            raise _refusal(name, OPTIONS[name])


def without_neutral_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields but those of `FIELDS`. Raises `FieldError` if one of these asks for something."""
    rest: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            rest[name] = value
            continue
        feature, neutral = FIELDS[name]
        if name == "best_of":
            neutral = (*neutral, fields.get("n"))
        if value is not None and value not in neutral:
            raise _refusal(name, feature)
    return rest


def refuse_model_files(path: Path, field: str) -> None:
    """Raises `FieldError` for a directory that holds a LoRA adapter, or nothing but GGUF files."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        for file in sorted(path.glob("*.gguf")):
            raise FieldError(field, f"{path} is a folder of GGUF files", f"name one, say {file}")
    if (path / "adapter_config.json").is_file():
        raise _refusal(field, f"LoRA ({path})", "merge the adapter into its model first")


def _refusal(field: str, feature: str, remedy: str = "leave it out") -> FieldError:
    return FieldError(field, f"{feature} is not supported yet", remedy)
