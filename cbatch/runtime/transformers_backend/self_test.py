"""Compares a transformers model with our attention to the unchanged model, at every load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelConfig, ModelError

_BLOCK_TOKENS = 4
_LENGTHS = 23, 14
_STEPS = (9, 5), (7, 1), (1, 6), (6, 2)  # tokens of each row per step: chunks with decodes
# Limits of differences, in standard deviations of the logits. The limit for half precision is for
# the mean: the model's own code rounds between layers, and a router may choose another expert.
_MAX_OF_FP32, _MAX_OF_HALF = 1e-3, 0.15
_MAX_IN_BATCH = 1e-3  # limit of the difference between a row in a batch and the row alone
_STATEFUL = re.compile(r"Mamba|SSM|DeltaNet|LinearAttention|Recurrent|RWKV|ShortConv|xLSTM")


class ComparedModel(Protocol):
    """A model under comparison; `kv_dtype` is the dtype of its KV during the comparison."""

    net: nn.Module
    path: Path
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype
    config: ModelConfig

    def forward(self, batch: RaggedBatch, kv: KVCache) -> Tensor: ...


class Reference(NamedTuple):
    """Rows of tokens, int64 [n], and the model's own logits of each: fp32 [n, vocab]."""

    tokens: list[Tensor]
    logits: list[Tensor]


@torch.inference_mode()
def reference_of(net: nn.Module, path: Path) -> Reference:
    """Run the model as loaded by transformers. Raises ModelError for a model that fails, or that
    keeps state other than KV."""
    for module in net.modules():
        name = type(module).__name__
        if _STATEFUL.search(name) or isinstance(module, nn.Conv1d):
            raise ModelError(f"{path}: {name} keeps state that is not attention")
    rng = np.random.default_rng(0)
    vocab = net.get_input_embeddings().weight.shape[0]
    rows = [torch.from_numpy(rng.integers(0, vocab, n)) for n in _LENGTHS]
    device = net.get_input_embeddings().weight.device
    try:
        outputs = [net(input_ids=row[None].to(device), use_cache=False).logits[0] for row in rows]
        logits = [each.float().cpu() for each in outputs]
    except Exception as error:  # modelling code may raise anything
        problem = f"{type(error).__name__}: {error!s:.200}"
        raise ModelError(f"{path}: {type(net).__name__} does not run: {problem}") from error
    return Reference(rows, logits)


def compare(
    model: ComparedModel,
    reference: Reference,
    *,
    block_tokens: int = _BLOCK_TOKENS,
    own_bits: bool = True,
) -> float:
    """Return the largest difference, in standard deviations of the logits. Raises ModelError if two
    rows in a batch differ from each row alone, or from the model's own logits. Without `own_bits`,
    rounding may depend on the batch."""
    rows, name = reference.tokens, type(model.net).__name__
    mixed = _logits(model, rows, list(_STEPS), block_tokens)
    alone = [_logits(model, [row], [(len(row),)], block_tokens)[0] for row in rows]
    expected, actual = torch.cat(reference.logits), torch.cat(mixed)
    spread = expected.std()
    whole = model.dtype == torch.float32
    differences = (actual - torch.cat(alone)).abs() / spread
    exact = whole or own_bits
    difference = (differences.max() if exact else differences.mean()).item()
    if not difference <= (_MAX_IN_BATCH if exact else _MAX_OF_HALF):
        raise ModelError(
            f"{model.path}: {name} computes other logits for rows in a batch than for each "
            f"alone: they are {difference:.2g} standard deviations apart; it cannot be served"
        )
    differences = (actual - expected).abs() / spread
    difference = (differences.max() if whole else differences.mean()).item()
    if not difference <= (_MAX_OF_FP32 if whole else _MAX_OF_HALF):
        raise ModelError(
            f"{model.path}: {name} computes other logits with our attention than with its own: "
            f"they are {difference:.2g} standard deviations apart; it cannot be served"
        )
    return differences.max().item()


def _logits(
    model: ComparedModel, rows: list[Tensor], steps: list[tuple[int, ...]], block_tokens: int
) -> list[Tensor]:
    width = -(-max(map(len, rows)) // block_tokens)
    tables = np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)[::-1]
    kv = KVCache(model.config, tables.size, block_tokens, model.kv_dtype, model.device)
    logits_of: list[list[Tensor]] = [[] for _ in rows]
    done = np.zeros(len(rows), dtype=np.int32)
    for lens in (np.array(step, dtype=np.int32) for step in steps):
        spans = [slice(at, at + n) for at, n in zip(done, lens, strict=True)]
        positions = [torch.arange(span.start, span.stop) for span in spans]
        done = done + lens
        batch = RaggedBatch(
            tokens=torch.cat([row[span] for row, span in zip(rows, spans, strict=True)]),
            positions=torch.cat(positions),
            query_lens=lens,
            context_lens=done,
            block_tables=tables,
            logits_index=torch.arange(int(lens.sum())),
        )
        for parts, logits in zip(
            logits_of, model.forward(batch, kv).split(lens.tolist()), strict=True
        ):
            parts.append(logits)
    return [torch.cat(parts) for parts in logits_of]
