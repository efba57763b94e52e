"""The systems that are compared, and their settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.failures import Failures
from bench.peers.models import ModelFormats
from bench.peers.worker import System, Worker
from cbatch.runtime.model.gguf_file import is_gguf

CBATCH, LLAMA_CPP, VLLM = "cbatch", "llama.cpp", "vllm"
OPENVINO, LAYERS = "openvino", "transformers"
# The package of each peer, and the flag that names another Python that has it.
PACKAGES = {LLAMA_CPP: "llama_cpp", VLLM: "vllm", OPENVINO: "openvino_genai", LAYERS: LAYERS}
FLAGS = {LLAMA_CPP: "--llama", VLLM: "--vllm", OPENVINO: "--openvino"}
PEERS = tuple(PACKAGES)
_VLLM_BLOCK_TOKENS = 128  # block size for which vLLM's pool is computed


class Sizes(NamedTuple):
    """Limits of a run: concurrent sequences, tokens per sequence, and tokens per cbatch step."""

    max_sequences: int
    tokens: int
    step_tokens: int


def python_of(peer: str, args: argparse.Namespace) -> str | None:
    """Return the Python that has the peer, from its flag or this one; None if no Python has it."""
    named: str | None = getattr(args, FLAGS[peer].removeprefix("--")) if peer in FLAGS else None
    return named or (sys.executable if find_spec(PACKAGES[peer]) is not None else None)


def make_systems(
    model: ModelFormats, args: argparse.Namespace, sizes: Sizes, *, exact: bool = False
) -> list[System]:
    """Return cbatch by lookahead, off first, then the installed peers in the given order. With
    `exact`, systems with a choice of dtype use float32."""
    threads, common = args.threads, {"max_sequences": sizes.max_sequences, "tokens": sizes.tokens}
    timed = common | {"threads": threads, "exact": exact}
    own = timed | {"step_tokens": sizes.step_tokens, "draft": None, "lookahead": "off"}
    systems: list[System] = []

    def add(name: str, worker: str, python: str, settings: dict[str, Any]) -> None:
        lookahead = settings.get("lookahead", "off")
        systems.append(System(name, lookahead, worker, python, threads, settings))

    for lookahead in args.lookahead if model.draft else ["off"]:
        draft = {} if lookahead == "off" else {"draft": str(model.draft), "lookahead": lookahead}
        add(
            CBATCH,
            "cbatch",
            sys.executable,
            own | {"model": str(model.cbatch_path)} | draft,
        )
    for peer in args.peer:
        python = python_of(peer, args)
        if python is None or (peer == OPENVINO and not is_gguf(model.source)):
            continue
        if peer == LLAMA_CPP:
            add(peer, "llama_cpp", python, timed | {"model": str(model.gguf(exact))})
        elif peer == OPENVINO:
            settings = timed | {"step_tokens": sizes.step_tokens, "model": str(model.gguf(exact))}
            add(peer, "openvino", python, settings)
        elif peer == LAYERS:
            settings = own | {"model": str(model.directory), "model_impl": peer}
            add(peer, "cbatch", python, settings)
        else:
            dtype = "float32" if exact else model.dtype
            settings = common | {"model": str(model.directory), "dtype": dtype}
            add(peer, "vllm", python, settings | {"kv_bytes": _kv_bytes(model, sizes)})
    return systems


@contextmanager
def started(systems: list[System], failures: Failures) -> Iterator[list[Worker]]:
    """Start the systems that have not failed, each in a process that ends with the context."""
    with ExitStack() as stack:
        workers = []
        for system in systems:
            if system.label not in failures:
                with failures.caught(system.label):
                    worker = stack.enter_context(Worker(system))
                    worker.start()
                    workers.append(worker)
        yield workers


def _kv_bytes(model: ModelFormats, sizes: Sizes) -> int:
    """Return bytes of a KV pool that suffices in float32, in whole blocks."""
    blocks = sizes.max_sequences * (-(-sizes.tokens // _VLLM_BLOCK_TOKENS) + 1) + 1
    c = model.config
    return blocks * _VLLM_BLOCK_TOKENS * 4 * sum(layer.mixer.kv_values for layer in c.layers)
