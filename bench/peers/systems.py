"""The systems that are compared, and their settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.engine.systems import System
from bench.failures import Failures
from bench.peers.files import ModelFormats
from bench.peers.processes import Worker
from cbatch.runtime.model.config import ModelConfig

CBATCH, LLAMA_CPP, VLLM = "cbatch", "llama.cpp", "vllm"
LIMITS = "limits"
OPENVINO = "openvino"
PEERS = (LLAMA_CPP, VLLM, OPENVINO, "generate", "continuous")
# Package of each peer that another Python may have, and the flag that names this Python.
PACKAGES = {LLAMA_CPP: "llama_cpp", VLLM: "vllm", OPENVINO: "openvino_genai"}
FLAGS = {LLAMA_CPP: "--llama", VLLM: "--vllm", OPENVINO: "--openvino"}
_VLLM_BLOCK_TOKENS = 128  # block size for which vLLM's pool is computed


class Entrant(NamedTuple):
    """A system, the Python that has it, and the settings of its worker."""

    name: str
    lookahead: str
    worker: str
    python: str
    threads: int
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        return self.name if self.lookahead == "off" else f"{self.name} {self.lookahead}"

    def new_worker(self) -> Worker:
        return Worker(self.worker, self.python, self.threads)


class Sizes(NamedTuple):
    """Limits of a run: concurrent sequences, tokens per sequence, and tokens per cbatch step."""

    max_sequences: int
    tokens: int
    step_tokens: int


def python_of(peer: str, args: argparse.Namespace) -> str | None:
    """Return the Python that has the peer, from its flag or this one; None if no Python has it."""
    if peer not in PACKAGES:
        return sys.executable
    named: str | None = getattr(args, FLAGS[peer].removeprefix("--"))
    return named or (sys.executable if find_spec(PACKAGES[peer]) is not None else None)


def make_entrants(
    model: ModelFormats, args: argparse.Namespace, sizes: Sizes, *, exact: bool = False
) -> list[Entrant]:
    """Return cbatch by lookahead, off first, then the installed peers in the given order. With
    `exact`, systems with a choice of dtype use float32."""
    dtype = "float32" if exact else model.dtype
    max_sequences, tokens, threads = sizes.max_sequences, sizes.tokens, args.threads
    entrants = []
    for lookahead in args.lookahead if model.draft else ["off"]:
        settings: dict[str, Any] = {
            "model": str(model.cbatch_path),
            "draft": None if lookahead == "off" else str(model.draft),
            "lookahead": lookahead,
            "dtype": "float32" if exact else "auto",  # another dtype would dequantise the weights
            "max_sequences": max_sequences,
            "tokens": tokens,
            "step_tokens": sizes.step_tokens,
            "threads": threads,
        }
        entrants.append(Entrant(CBATCH, lookahead, "cbatch", sys.executable, threads, settings))
    for peer in args.peer:
        python = python_of(peer, args)
        if python is None or (peer == OPENVINO and not model.has_gguf_tokenizer):
            continue
        settings = {"max_sequences": max_sequences, "tokens": tokens}
        if peer == LLAMA_CPP:
            settings |= {"model": str(model.gguf(exact)), "threads": threads, "exact_kv": exact}
            entrants.append(Entrant(peer, "off", "llama_cpp", python, threads, settings))
            continue
        if peer == OPENVINO:
            settings |= {"model": str(model.gguf(exact)), "threads": threads, "exact": exact}
            settings |= {"step_tokens": sizes.step_tokens}
            entrants.append(Entrant(peer, "off", "openvino", python, threads, settings))
            continue
        settings |= {"model": str(model.directory), "dtype": dtype}
        if peer == VLLM:
            settings |= {"kv_bytes": _kv_bytes(model.config, sizes), "eager": args.vllm_eager}
            name = "vllm eager" if args.vllm_eager else peer
            entrants.append(Entrant(name, "off", "vllm", python, threads, settings))
            continue
        settings |= {"threads": threads, "continuous": peer == "continuous"}
        name = "transformers continuous" if peer == "continuous" else "transformers"
        entrants.append(Entrant(name, "off", "transformers", python, threads, settings))
    return entrants


def limits(model: ModelFormats, threads: int) -> Entrant:
    """Return the limits of the machine with this model's weights (see `limits_worker`)."""
    settings: dict[str, Any] = {
        "weight_bytes": model.weight_bytes,
        "token_flop": model.token_flop,
        "prompt_flop": model.prompt_flop,
        # Integer products are faster than the products whose speed the worker measures.
        "row_flop": 0 if model.quantised else model.token_flop + model.prompt_flop,
        "threads": threads,
    }
    return Entrant(LIMITS, "off", "limits", sys.executable, threads, settings)


@contextmanager
def started(entrants: list[Entrant], failures: Failures) -> Iterator[list[System]]:
    """Start the systems that have not failed, each in a process that ends with the context."""
    with ExitStack() as stack:
        systems = []
        for entrant in entrants:
            if entrant.label not in failures:
                with failures.caught(entrant.label):
                    worker = stack.enter_context(entrant.new_worker())
                    worker.start(**entrant.settings)
                    systems.append(System(entrant.name, entrant.lookahead, worker.run))
        yield systems


def start_one_by_one(entrants: list[Entrant], failures: Failures) -> Iterator[System]:
    """Yield the systems one by one. Each has ended before the next starts: two may not fit into
    memory."""
    for entrant in entrants:
        with started([entrant], failures) as systems:
            yield from systems


def _kv_bytes(config: ModelConfig, sizes: Sizes) -> int:
    """Return bytes of a KV pool that suffices in float32, in whole blocks."""
    blocks = sizes.max_sequences * (-(-sizes.tokens // _VLLM_BLOCK_TOKENS) + 1) + 1
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    return blocks * _VLLM_BLOCK_TOKENS * token_bytes
