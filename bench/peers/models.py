"""The systems that are compared, the processes that run them, and a model in the formats that they
read: a Hugging Face directory or a GGUF file. A missing format is written once, from the same
weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from bench.peers.engines import Prompts
from bench.peers.gguf_converter import convert
from bench.peers.gguf_files import BF16, F16, F32, write_gguf
from bench.report import Failures
from bench.shapes import SHAPES, write_random_model
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_paths
from cbatch.engine.model_files import PACKAGED, find_model, tokenizer_of
from cbatch.runtime.model.checkpoint import read_config
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.gguf_file import SUFFIX, is_gguf, read_gguf
from cbatch.runtime.model.gguf_model import config_of
from cbatch.runtime.model.gguf_tensors import GgufWeights
from cbatch.text import TextTokenizer, TokenizerError

_ROOT = Path(__file__).parents[2]
_SETTLE_S = 0.3  # pause before a run, until idle threads of the previous system stop spinning
CBATCH, LLAMA_CPP, VLLM = "cbatch", "llama.cpp", "vllm"
OPENVINO, LAYERS = "openvino", "transformers"
# The package of each peer, and the flag that names another Python that has it.
PACKAGES = {LLAMA_CPP: "llama_cpp", VLLM: "vllm", OPENVINO: "openvino_genai", LAYERS: LAYERS}
FLAGS = {LLAMA_CPP: "--llama", VLLM: "--vllm", OPENVINO: "--openvino"}
PEERS = tuple(PACKAGES)
_VLLM_BLOCK_TOKENS = 128  # block size for which vLLM's pool is computed
NAMES = (*SHAPES, "demo", *PACKAGED)
_PLAIN = {"F32": F32, "F16": F16, "BF16": BF16}
TYPES = (*_PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M")
TYPES += (
    "Q2_K",
    "Q3_K_M",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4_MOE",
)  # llama.cpp's names of types that cbatch reads


class Run(msgspec.Struct):
    seconds: float
    outputs: Prompts  # token ids, in order of the prompts
    steps_s: list[float] = []  # durations of decoding steps, if the system reports them

    def __add__(self, later: Run) -> Run:
        outputs, steps_s = self.outputs + later.outputs, self.steps_s + later.steps_s
        return Run(self.seconds + later.seconds, outputs, steps_s)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class System(NamedTuple):
    """A compared system: its engine, a Python that can import it, and its settings."""

    name: str
    engine: str
    python: str
    threads: int
    settings: dict[str, Any]

    @property
    def lookahead(self) -> str:
        return str(self.settings.get("lookahead", "off"))

    @property
    def label(self) -> str:
        return self.name if self.lookahead == "off" else f"{self.name} {self.lookahead}"


class Worker:
    """A process that runs a system. The constructor returns when it has imported the system. Every
    call raises RuntimeError, with the end of the worker's output, if the worker dies."""

    def __init__(self, system: System) -> None:
        threads = str(system.threads)
        environment = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self.system = system
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [system.python, "-m", "bench.peers.engines", system.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            cwd=_ROOT,
            env=os.environ | environment,
        )
        self._read_answer()  # sent after the imports

    def start(self) -> float:
        return float(self._ask(self.system.settings)["seconds"])

    def call(self, method: str, *arguments: Any) -> Any:
        return self._ask({"method": method, "arguments": arguments})["value"]

    def run(self, prompts: Prompts, output_tokens: int) -> Run:
        time.sleep(_SETTLE_S)
        answer = self._ask({"method": "run", "arguments": [prompts, output_tokens]})
        outputs, ends_s = answer["value"]
        return Run(answer["seconds"], outputs, np.diff(ends_s).tolist())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._output.close()

    def _ask(self, call: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self.__exit__()
        raise RuntimeError(f"the worker of {self.system.name} died:\n{text[-3000:]}")


@contextlib.contextmanager
def started(systems: Sequence[System], failures: Failures) -> Iterator[list[Worker]]:
    """Start the systems that have not failed, each in a process that ends with the context."""
    with contextlib.ExitStack() as stack:
        workers = []
        for system in systems:
            if system.label not in failures:
                with failures.caught(system.label):
                    worker = stack.enter_context(Worker(system))
                    worker.start()
                    workers.append(worker)
        yield workers


class ModelFormats:
    """One model in all formats. With `kind` None its format is kept; otherwise cbatch and
    llama.cpp get one GGUF file of that type. Files are written to `folder`. `llama` is a Python
    with llama.cpp, which is needed to quantise a model or to convert a GGUF file."""

    def __init__(
        self, name: str, kind: str | None, folder: Path, *, llama: str | None, threads: int
    ) -> None:
        self.name = f"{Path(name).name} {kind}" if kind else Path(name).name
        self._kind, self._folder, self._llama, self._threads = kind, folder, llama, threads
        self.draft: Path | None = None
        if name == "demo":
            self.source, self.draft = demo_paths()
        elif name in SHAPES:
            dtype = "float32" if name == "llama-1m" else "bfloat16"
            self.source = write_random_model(name, folder, dtype)
        else:
            self.source = Path(find_model(name)).resolve()

    @cached_property
    def cbatch_path(self) -> Path:
        is_file = is_gguf(self.source)
        if self._kind is None:
            return self.source
        if self._kind in _PLAIN and not is_file:
            return self._gguf_file(self._kind)
        if self._llama is None:
            raise FieldError("type", f"{self._kind} is written by llama.cpp", "name it by --llama")
        path = self._folder / f"{self.source.name.removesuffix(SUFFIX)}-{self._kind}.gguf"
        source = self.source if is_file else self._gguf_file("BF16")
        settings = {"model": None, "max_sequences": 0, "tokens": 0, "threads": 0, "exact": False}
        system = System(LLAMA_CPP, LLAMA_CPP, self._llama, self._threads, settings)
        with Worker(system) as worker:
            worker.start()
            worker.call("quantise", str(source), str(path), self._kind, self._threads)
        return path

    def gguf(self, exact: bool) -> Path:
        """Return a GGUF file for llama.cpp: cbatch's file if it is GGUF, otherwise the type
        that suits llama.cpp best: f16 for bf16, f32 for float32 and if results are compared
        (`exact`)."""
        if is_gguf(self.cbatch_path):
            return self.cbatch_path
        return self._gguf_file("F32" if exact or self.dtype == "float32" else "F16")

    @cached_property
    def directory(self) -> Path:
        if not is_gguf(self.cbatch_path):
            return self.cbatch_path
        path = self._folder / f"{self.cbatch_path.name}-directory"
        write_directory(self.cbatch_path, path)
        if not is_gguf(self.source):
            shutil.copy(self.source / "config.json", path)
        return path

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.source)

    @property
    def dtype(self) -> str:
        return "float32" if self._kind == "F32" else self.config.torch_dtype or "float32"

    @property
    def quantised(self) -> bool:
        return is_gguf(self.cbatch_path) and any(
            tensor.type.elements > 1 for tensor in read_gguf(self.cbatch_path).tensors.values()
        )

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        try:
            return tokenizer_of(self.source)
        except TokenizerError:
            return None

    def _gguf_file(self, kind: str) -> Path:
        path = self._folder / f"{self.source.name}-{kind}.gguf"
        if not path.exists():
            write_gguf(path, *convert(self.source, _PLAIN[kind]))
        return path


def write_directory(file: Path, directory: Path) -> None:
    """Write a GGUF file's weights in bf16 as a directory that transformers and vLLM read, without a
    tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    gguf = read_gguf(file)
    config = config_of(gguf)
    source = GgufWeights(gguf, config, torch.bfloat16)
    with torch.device("meta"):
        hf_config = AutoConfig.for_model(config.family, **_config_fields(config))
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    weights = {name: source.get(name, tuple(p.shape)) for name, p in model.named_parameters()}
    if config.attention.rope.interleaved:  # transformers wants the halves of a head in order
        for name in (n for n in weights if n.endswith(("q_proj.weight", "k_proj.weight"))):
            pairs = weights[name].unflatten(0, (-1, config.attention.key_dim // 2, 2))
            weights[name] = pairs.transpose(1, 2).flatten(0, 2)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(directory)


def _config_fields(c: ModelConfig) -> dict[str, Any]:
    m = c.attention
    rope: dict[str, Any] = {"rope_type": m.rope.type, "rope_theta": m.rope.theta}
    if m.rope.divisors:  # Llama 3's scaling, for which a GGUF file has no other form
        rope |= {"rope_type": "llama3", "factor": max(m.rope.divisors), "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif m.rope.type != "default":
        rope |= {"factor": m.rope.factor}
    if m.rope.type == "yarn":
        rope |= {"original_max_position_embeddings": m.rope.original_max_position_tokens}
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            rope[name] = getattr(m.rope, name)
    # With a linear scaling this is the length before scaling.
    stretched = m.rope.factor if m.rope.type == "linear" else 1
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.widest_inner,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.key_dim,
        "max_position_embeddings": round(c.max_position_tokens / stretched),
        "rms_norm_eps": None if c.norm is None else c.norm.eps,
        "sliding_window": m.window,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": m.bias,
        "mlp_bias": c.feed_forward.bias,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
        "rope_parameters": rope,
    }


class Sizes(NamedTuple):
    """Limits of a run: concurrent sequences, tokens per sequence, and tokens per cbatch step."""

    max_sequences: int
    tokens: int
    step_tokens: int


def python_of(peer: str, args: argparse.Namespace) -> str | None:
    named: str | None = getattr(args, FLAGS[peer].removeprefix("--")) if peer in FLAGS else None
    return named or (sys.executable if find_spec(PACKAGES[peer]) is not None else None)


def make_systems(
    model: ModelFormats, args: argparse.Namespace, sizes: Sizes, *, exact: bool = False
) -> list[System]:
    """Return cbatch by lookahead, off first, then the installed peers in the given order. With
    `exact`, systems with a choice of dtype use float32."""
    timed: dict[str, Any] = {"max_sequences": sizes.max_sequences, "tokens": sizes.tokens}
    timed |= {"threads": args.threads, "exact": exact}
    own = timed | {"step_tokens": sizes.step_tokens, "draft": None, "lookahead": "off"}
    own["model"] = str(model.cbatch_path)
    systems: list[System] = []
    for lookahead in args.lookahead if model.draft else ["off"]:
        draft = {} if lookahead == "off" else {"draft": str(model.draft), "lookahead": lookahead}
        systems.append(System(CBATCH, CBATCH, sys.executable, args.threads, own | draft))
    for peer in args.peer:
        python = python_of(peer, args)
        if python is None or (peer == OPENVINO and not is_gguf(model.source)):
            continue
        if peer == LLAMA_CPP:
            settings = timed | {"model": str(model.gguf(exact))}
        elif peer == OPENVINO:
            settings = timed | {"step_tokens": sizes.step_tokens, "model": str(model.gguf(exact))}
        elif peer == LAYERS:
            settings = own | {"model": str(model.directory), "model_impl": peer}
        else:
            settings = {"model": str(model.directory), "dtype": "float32" if exact else model.dtype}
            settings |= {"max_num_seqs": sizes.max_sequences, "max_model_len": sizes.tokens}
            settings["kv_cache_memory_bytes"] = _kv_bytes(model, sizes)
        engine = CBATCH if peer == LAYERS else peer
        systems.append(System(peer, engine, python, args.threads, settings))
    return systems


def _kv_bytes(model: ModelFormats, sizes: Sizes) -> int:
    """Return bytes of a KV pool that suffices in float32, in whole blocks."""
    blocks = sizes.max_sequences * (-(-sizes.tokens // _VLLM_BLOCK_TOKENS) + 1) + 1
    c = model.config
    return blocks * _VLLM_BLOCK_TOKENS * 4 * sum(layer.mixer.kv_values for layer in c.layers)
