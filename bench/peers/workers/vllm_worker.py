"""The worker that runs vLLM on a CPU, without a separate engine process. Its Python needs only
vllm."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.peers.workers.serving import serve

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
PRELOADED = ("vllm/libs/libtcmalloc*.so*", "../../libiomp5.so")


class Vllm:
    def __init__(
        self, model: str, dtype: str, *, max_sequences: int, tokens: int, kv_bytes: int
    ) -> None:
        from vllm import LLM

        # vLLM's cache of compiled code depends on the given path, so every run gives the same path.
        os.chdir(Path(model).parent)
        self._llm = LLM(
            Path(model).name,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=tokens,
            max_num_seqs=max_sequences,
            kv_cache_memory_bytes=kv_bytes,
            enable_prefix_caching=False,
        )

    def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[Any, list[float]]:
        """Return the outputs, and no times of steps."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": ids} for ids in prompts]
        lengths = {"max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True}
        params = SamplingParams(temperature=0.0, detokenize=False, **lengths)
        completions = self._llm.generate(requests, params, use_tqdm=False)
        return [list(completion.outputs[0].token_ids) for completion in completions], []


def preload() -> None:
    """Restart this process with the libraries that vLLM's documentation recommends, if present."""
    os.environ |= SETTINGS
    package = find_spec("vllm")
    if package is None or package.origin is None or "LD_PRELOAD" in os.environ:
        return
    site = Path(package.origin).parents[1]
    libraries = [str(file) for pattern in PRELOADED for file in sorted(site.glob(pattern))[:1]]
    os.environ["LD_PRELOAD"] = ":".join(libraries)
    os.execv(sys.executable, [sys.executable, "-m", "bench.peers.workers.vllm_worker"])


if __name__ == "__main__":
    preload()
    import vllm  # noqa: F401 - imports are not timed

    serve(Vllm)
