"""Options and request fields of other engines that this engine does not support.

They are rejected by name, not ignored, unless their value is neutral. The README lists the
larger features ("What it does not do"). `cbatch.runtime.model.config` rejects unsupported models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cbatch.core.request.errors import FieldError, did_you_mean


class Missing:
    """A feature that is not supported, the values that do not use it, and the remedy."""

    def __init__(self, feature: str, *neutral: Any, remedy: str = "leave it out") -> None:
        self.problem, self.neutral, self.remedy = f"{feature} is not supported", neutral, remedy

    def check(self, origin: str, value: Any) -> None:
        if value is not None and value not in self.neutral:
            raise FieldError(origin, self.problem, self.remedy)


_GENERATE = Missing("another task than generation", "auto", "generate")
_LORA, _OFFLOAD, _MULTIMODAL = (
    Missing("LoRA"),
    Missing("KV offload", 0),
    Missing("multimodal input", {}, []),
)
_REVISION = Missing("choosing a revision", "main", remedy="name a directory with that revision")
_TLS = Missing("TLS", remedy="put a proxy in front")
# An option with a neutral True or False is a switch.
UNSUPPORTED_OPTIONS = {
    "adapter": _LORA,
    "allowed_origins": Missing("a list of origins", remedy="give cors_origin for each of them"),
    "async_scheduling": Missing("this name", remedy="use overlap 1 or 0"),
    "collect_detailed_traces": Missing("tracing modules of the engine"),
    "cpu_offload_gb": Missing("offload of weights", 0),
    "data_parallel_size": Missing("data parallelism", 1, remedy="run replicas by --ray"),
    "disable_log_requests": Missing("logging prompts", True),
    "disable_log_stats": Missing("logging statistics", True, remedy="read /metrics"),
    "download_dir": Missing("another directory for downloads", remedy="set HF_HOME"),
    "enable_auto_tool_choice": Missing("forced tool calls alone", True),
    "enable_chunked_prefill": Missing(
        "prompts in one chunk", True, remedy="raise max_num_batched_tokens"
    ),
    "enable_expert_parallel": Missing("expert parallelism", False),
    "enable_lora": Missing("LoRA", False),
    "enforce_eager": Missing("running without captured graphs", False),
    "hf_overrides": Missing("overriding config.json", {}, remedy="edit the model's config.json"),
    "kv_offloading_size": _OFFLOAD,
    "kv_transfer_config": Missing("KV transfer"),
    "limit_mm_per_prompt": _MULTIMODAL,
    "load_format": Missing("a format other than that of the files", "auto"),
    "lora_modules": _LORA,
    "max_logprobs": Missing("another limit than 20", 20),
    "override_generation_config": Missing("this name", {}, remedy="give the fields with requests"),
    "pipeline_parallel_size": Missing("pipeline parallelism", 1),
    "quantization": Missing("quantising while loading", remedy="leave it out: the files say it"),
    "revision": _REVISION,
    "runner": _GENERATE,
    "skip_tokenizer_init": Missing("this name", False, remedy="use tokenizer none"),
    "spec_method": Missing("this name", remedy="use speculative_config"),
    "ssl_certfile": _TLS,
    "ssl_keyfile": _TLS,
    "swap_space": _OFFLOAD,
    "task": _GENERATE,
    "tokenizer_mode": Missing("another kind of tokenizer", "auto"),
    "tokenizer_revision": _REVISION,
    "trust_remote_code": Missing("running code of a model's repository", False),
}

_MAX_TOKENS = Missing("another server's name", remedy="use max_tokens")
_SAMPLER = Missing("this sampler", 0)
UNSUPPORTED_FIELDS = {
    "bad_words": Missing("banning words", [], remedy="use banned_token_ids"),
    "best_of": Missing("best_of", 1),  # the value of `n` is accepted, too
    "chat_template": Missing("a client's own template"),
    "continue_final_message": Missing("continuing a message", False),
    "documents": Missing("documents", []),
    "dry_multiplier": _SAMPLER,
    "function_call": Missing("the older name of `tool_choice`", "none", remedy="use tool_choice"),
    "functions": Missing("the older name of `tools`", [], remedy="use tools"),
    "guided_whitespace_pattern": Missing("a pattern of white space"),
    "images": _MULTIMODAL,
    "length_penalty": Missing("beam search", 1),
    "logprob_token_ids": Missing("log probabilities of chosen ids", [], remedy="use logprobs"),
    "lora_request": _LORA,
    "max_new_tokens": _MAX_TOKENS,
    "mirostat": _SAMPLER,
    "mm_processor_kwargs": _MULTIMODAL,
    "modalities": Missing("output other than text", ["text"]),
    "multi_modal_data": _MULTIMODAL,
    "n_predict": _MAX_TOKENS,
    "prompt_embeds": Missing("a prompt of embeddings", []),
    "repeat_penalty": Missing("another server's name", 1, remedy="use repetition_penalty"),
    "repetition_detection": Missing("stopping at repetitions"),
    "return_tokens_as_token_ids": Missing("ids as text", False, remedy="use return_token_ids"),
    "suffix": Missing("text after the completion", ""),
    "thinking_token_budget": Missing("a limit of reasoning tokens", -1),
    "truncation_side": Missing("truncation on the right", "left"),
    "typical_p": Missing("this sampler", 1),
    "use_beam_search": Missing("beam search", False),
    "xtc_probability": _SAMPLER,
}


def require_neutral_option(name: str, value: Any, origin: str, known: Collection[str]) -> None:
    """Raise `FieldError`, which names `origin`, if an option is unknown or its feature unsupported.
    An unsupported option is accepted if its value is neutral, also as text. The message for an
    unknown option lists the `known` options."""
    positive = name.removeprefix("no_")
    option = UNSUPPORTED_OPTIONS.get(positive)
    if option is None:
        problem = f"is not known{did_you_mean(name, known)}"
        raise FieldError(origin, problem, f"use {', '.join(sorted(known))}")
    texts = {str(each).lower(): each for each in option.neutral} | {"on": True, "off": False}
    value = texts.get(str(value).lower(), value)
    option.check(origin, value if positive == name else not value)


def without_neutral_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not in `UNSUPPORTED_FIELDS`. Raise `FieldError` if one of the
    others has a value that uses its feature."""
    for name in fields.keys() & UNSUPPORTED_FIELDS.keys():
        if name != "best_of" or fields[name] != fields.get("n"):
            UNSUPPORTED_FIELDS[name].check(name, fields[name])
    return {name: value for name, value in fields.items() if name not in UNSUPPORTED_FIELDS}
