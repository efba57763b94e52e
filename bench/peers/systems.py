"""Who is compared: what each is started with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.engine.systems import System
from bench.peers.files import ModelFiles
from bench.peers.processes import Worker
from cbatch.runtime.model.config import ModelConfig

OURS, LLAMA_CPP, VLLM = "cbatch", "llama.cpp", "vllm"
LIMITS = "limits"
PEERS = (LLAMA_CPP, VLLM, "generate", "continuous")
_PACKAGES = {LLAMA_CPP: "llama_cpp", VLLM: "vllm"}
_VLLM_BLOCK_TOKENS = 128


class Entrant(NamedTuple):
    """A system, the Python that has it, and what it is started with."""

    name: str
    lookahead: str
    worker: str
    python: str
    threads: int
    settings: dict[str, Any]

    def worker_of_it(self) -> Worker:
        return Worker(self.worker, self.python, self.threads)


class Sizes(NamedTuple):
    """The most sequences at a time, the most tokens of one, and of one of our steps."""

    most: int
    tokens: int
    step_tokens: int


def python_of(peer: str, args: argparse.Namespace) -> str | None:
    """Which has the peer: the one that was named, or this one; None where it is not there."""
    named = {LLAMA_CPP: args.llama, VLLM: args.vllm}.get(peer)
    if named is not None:
        return str(named)
    package = _PACKAGES.get(peer)
    return sys.executable if package is None or find_spec(package) is not None else None


def choices(
    model: ModelFiles, args: argparse.Namespace, sizes: Sizes, *, exact: bool = False
) -> list[Entrant]:
    """Ours with lookahead off first, then the peers in the order in which they were named, without
    those that are not there. With `exact` whoever has a choice computes in float32."""
    dtype = "float32" if exact else model.dtype
    most, tokens, threads = sizes.most, sizes.tokens, args.threads
    found = []
    for lookahead in args.lookahead if model.draft else ["off"]:
        settings: dict[str, Any] = {
            "model": str(model.ours),
            "draft": None if lookahead == "off" else str(model.draft),
            "lookahead": lookahead,
            "dtype": "float32" if exact else "auto",  # any other would take blocks apart
            "most": most,
            "tokens": tokens,
            "step_tokens": sizes.step_tokens,
            "threads": threads,
        }
        found.append(Entrant(OURS, lookahead, "cbatch", sys.executable, threads, settings))
    for peer in args.peer:
        python = python_of(peer, args)
        if python is None:
            continue
        settings = {"most": most, "tokens": tokens}
        if peer == LLAMA_CPP:
            settings |= {"model": str(model.gguf(exact)), "threads": threads, "exact_kv": exact}
            found.append(Entrant(peer, "off", "llama_cpp", python, threads, settings))
            continue
        settings |= {"model": str(model.directory), "dtype": dtype}
        if peer == VLLM:
            settings |= {"kv_bytes": _kv_bytes(model.config, sizes), "eager": args.vllm_eager}
            name = "vllm eager" if args.vllm_eager else peer
            found.append(Entrant(name, "off", "vllm", python, threads, settings))
            continue
        settings |= {"threads": threads, "continuous": peer == "continuous"}
        name = "transformers continuous" if peer == "continuous" else "transformers"
        found.append(Entrant(name, "off", "transformers", python, threads, settings))
    return found


def limits(model: ModelFiles, threads: int) -> Entrant:
    """What the machine allows with this model's weights (see its worker)."""
    settings: dict[str, Any] = {
        "weight_bytes": model.weight_bytes,
        "token_flop": model.token_flop,
        "prompt_flop": model.prompt_flop,
        # Products of integers are faster than those of which the speed is known.
        "row_flop": 0 if model.quantised else model.token_flop + model.prompt_flop,
        "threads": threads,
    }
    return Entrant(LIMITS, "off", "limits", sys.executable, threads, settings)


@contextmanager
def started(found: list[Entrant]) -> Iterator[list[System]]:
    """All at once, each in its process."""
    with ExitStack() as stack:
        systems = []
        for choice in found:
            worker = stack.enter_context(choice.worker_of_it())
            worker.start(**choice.settings)
            systems.append(System(choice.name, choice.lookahead, worker.run))
        yield systems


def one_by_one(found: list[Entrant]) -> Iterator[System]:
    """Each is gone when the next is asked for: two may not fit into memory."""
    for choice in found:
        with started([choice]) as (system,):
            yield system


def _kv_bytes(config: ModelConfig, sizes: Sizes) -> int:
    """Enough in float32, in whole blocks."""
    blocks = sizes.most * (-(-sizes.tokens // _VLLM_BLOCK_TOKENS) + 1) + 1
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    return blocks * _VLLM_BLOCK_TOKENS * token_bytes
