"""Decoder layers of a transformers model in one call each.

Which layers compute what ours does is asked of them: each is watched over two steps, and ours has
to make the same of what they were given. Whatever else a layer does (a clamp that no number of ours
has met, a scale) is an operation of torch that is not looked for there: it stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.runtime.cpu.compiled import CompiledProduct
from cbatch.runtime.cpu.compiled.fused_layer import FusedLayer, LayerNorms
from cbatch.runtime.cpu.compiled.layer_attention import AttentionStep
from cbatch.runtime.cpu.compiled.rows import RowNorm
from cbatch.runtime.cpu.decoder import RaggedBatch
from cbatch.runtime.cpu.transformers_backend import attention
from cbatch.runtime.cpu.transformers_backend.beside import BesideProduct
from cbatch.runtime.cpu.transformers_backend.fused import FeedForward, Norm
from cbatch.runtime.cpu.transformers_backend.products import Product
from cbatch.runtime.cpu.transformers_backend.rotary import Factors, as_given, doubled
from cbatch.runtime.cpu.transformers_backend.step import HELD, AttentionLayer, Pass
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.kv_cache import KVCache

_BLOCK_TOKENS = 4
_STEPS = (9, 5), (1, 6)  # tokens of each of two rows: chunks, then a chunk beside a decode
_MOST_OF_FP32, _MOST_OF_HALF = 1e-4, 1e-2  # apart, in parts of what a layer adds to a row
# The norms before and behind attention, before and behind the feed-forward.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)
_TOGETHER = ("q_proj", "k_proj", "v_proj")
_OUT = ("o_proj", "dense", "out_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_NOTHING = (nn.Dropout, nn.Identity)  # which a model that is served does not notice
# What only looks at numbers otherwise, or makes room for them, or does nothing to who is served.
_SHAPING = {
    *(
        "_reshape_alias",
        "_to_copy",
        "_unsafe_view",
        "alias",
        "as_strided",
        "cat",
        "clone",
        "contiguous",
    ),
    *(
        "detach",
        "dropout",
        "empty",
        "empty_like",
        "expand",
        "flatten",
        "new_empty",
        "ones",
        "permute",
    ),
    *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "to", "transpose"),
    *("unflatten", "unsqueeze", "view", "zeros"),
}
Turn = tuple[Tensor, Tensor]


@dataclass(eq=False)
class _Seen:
    """A call of a layer: what it was given, what it gave, and torch's operations in it."""

    batch: RaggedBatch
    x: Tensor
    turn: Turn | None
    y: Any
    operations: Counter[str]


@dataclass(eq=False)
class _Candidate:
    """A layer whose parts are ours."""

    module: Any
    held: AttentionLayer
    qkv: CompiledProduct
    out: CompiledProduct
    norms: LayerNorms
    forward: Any  # the module behind attention
    seen: list[_Seen] = field(default_factory=list)


class _Ours(NamedTuple):
    """What is called in the place of a layer; `forward` where the feed-forward is the model's.
    `factors` of rotation are ours, made of the model's; None: nothing turns."""

    layer: FusedLayer
    held: AttentionLayer
    factors: Factors | None
    forward: nn.Module | None
    behind: RowNorm | None
    by: float

    def __call__(self, x: Tensor, turn: Turn | None) -> Tensor:
        owner = self.held.owner
        assert owner.kv is not None
        blocks = owner.kv.block_rows[self.held.index]
        factors = self.factors
        turn = None if turn is None or factors is None else (factors(turn[0]), factors(turn[1]))
        y, normed = self.layer(owner.step, blocks, x, turn)
        if self.forward is not None:
            made = self.forward(normed)
            made = made[0] if isinstance(made, tuple) else made
            made = made if self.behind is None else self.behind(made)
            y += made if self.by == 1 else made * self.by
        if owner.progress is not None:
            owner.progress[0] += 1
        return y


@torch.inference_mode()
def fuse_layers(
    net: nn.Module, step: Pass, config: ModelConfig, run: Callable[[RaggedBatch, KVCache], Any]
) -> int:
    """Replaces what it can of a model whose parts have been replaced and which `run` computes. How
    many layers it was."""
    found = [each for module in net.modules() if (each := _candidate(module)) is not None]
    if not found or step.compiled is None:
        return 0
    with _watched(found) as now:
        kv = _cache(config)
        for batch in _batches(net.get_input_embeddings().weight.shape[0]):
            now.clear()
            now.append(batch)
            run(batch, kv)
    kv, count = _cache(config), 0
    for each in found:
        ours = _same(each, kv)
        if ours is not None:
            each.module.forward = _calls(ours, each.module.forward)
            count += 1
    return count


def _candidate(module: nn.Module) -> _Candidate | None:
    """Of children: one that attends, norms, and one that feeds forward."""
    children = {
        name: child for name, child in module.named_children() if not isinstance(child, _NOTHING)
    }
    attends = [name for name, child in children.items() if hasattr(child, HELD)]
    if len(attends) != 1 or "forward" in vars(module):
        return None
    inside: Any = children.pop(attends[0])
    norms = {name: child.rows for name, child in children.items() if isinstance(child, Norm)}
    names = next((layout for layout in _NORMS if {*layout} - {None} == {*norms}), None)
    others = [child for name, child in children.items() if name not in norms]
    projections = _projections(inside)
    if names is None or len(others) != 1 or projections is None:
        return None
    qkv, out, heads = projections
    four = (None if name is None else norms[name] for name in names)
    held: AttentionLayer = getattr(inside, HELD)
    return _Candidate(module, held, qkv, out, LayerNorms(*four, *heads), others[0])


def _projections(
    inside: nn.Module,
) -> tuple[CompiledProduct, CompiledProduct, list[RowNorm | None]] | None:
    """Queries, keys and values in one; what is behind attention; norms of queries and keys."""
    children: dict[str, Any] = dict(inside.named_children())
    norms = [children.pop(name, None) for name in _HEAD_NORMS]
    out = [children.pop(name) for name in _OUT if name in children]
    if any(norm is not None and not isinstance(norm, Norm) for norm in norms) or len(out) != 1:
        return None
    parts = [children.pop(name, None) for name in _TOGETHER]
    if all(isinstance(part, BesideProduct) for part in parts):
        qkv = parts[0].group.product
    else:
        qkv = _compiled(children.pop("qkv_proj", None))
    if qkv is None or (behind := _compiled(out[0])) is None or _weighs(children):
        return None
    return qkv, behind, [None if norm is None else norm.rows for norm in norms]


def _compiled(product: Any) -> CompiledProduct | None:
    return product.linear.compiled if isinstance(product, Product) else None


def _weighs(children: dict[str, nn.Module]) -> bool:
    return any(len(list(child.parameters())) for child in children.values())


class _Operations(TorchDispatchMode):
    """Counts torch's operations, but for those of a feed-forward that is not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.elsewhere = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.elsewhere:
            self.count[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})

    def leave(self, *_: Any) -> None:
        self.elsewhere += 1

    def come_back(self, *_: Any) -> None:
        self.elsewhere -= 1


@contextmanager
def _watched(found: list[_Candidate]) -> Iterator[list[RaggedBatch]]:
    """What candidates are called with is entered into them; the batch is the one in the list."""
    now: list[RaggedBatch] = []
    hooks = []
    operations = _Operations()

    def watching(each: _Candidate) -> Callable[..., Any]:
        own = each.module.forward

        def forward(x: Tensor, *given: Any, **named: Any) -> Any:
            kept = x.clone()
            operations.count = Counter()
            with operations:
                y = own(x, *given, **named)
            turn = _turn(x, named.get("position_embeddings"))
            if not given:
                seen = y.clone() if isinstance(y, Tensor) else y
                each.seen.append(_Seen(now[0], kept, turn, seen, operations.count))
            return y

        return forward

    for each in found:
        each.module.forward = watching(each)
        if not isinstance(each.forward, FeedForward):
            hooks.append(each.forward.register_forward_pre_hook(operations.leave))
            hooks.append(each.forward.register_forward_hook(operations.come_back))
    try:
        yield now
    finally:
        for hook in hooks:
            hook.remove()
        for each in found:
            del each.module.forward


def _turn(x: Tensor, given: Any) -> Turn | None:
    """Factors of rotation, a row for each of x, if that is what they are."""
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    if any(not isinstance(e, Tensor) or e.dim() != 3 or e.shape[:2] != x.shape[:2] for e in given):
        return None
    same = given[0].dtype == given[1].dtype == torch.float32 and given[0].shape == given[1].shape
    return given if same else None


def _same(each: _Candidate, kv: KVCache) -> _Ours | None:
    """Ours that makes of all that was seen what the layer made."""
    if len(each.seen) != len(_STEPS) or not all(isinstance(s.y, Tensor) for s in each.seen):
        return None
    by = getattr(each.module, "residual_multiplier", None)
    gated = each.forward.gated if isinstance(each.forward, FeedForward) else None
    scales, by = 0 if by is None else 2, 1.0 if by is None else float(by)
    for seen in each.seen:
        others = {name: n for name, n in seen.operations.items() if name not in _SHAPING}
        if others.pop("add", 0) != 2 or others.pop("mul", 0) != scales or others:
            return None
    try:
        layer = FusedLayer(each.qkv, each.out, each.held.prepared, each.norms, gated, by)
    except ValueError:  # of shapes that do not go together
        return None
    other = None if gated is not None else each.forward
    behind = None if gated is not None else each.norms.behind_forward
    for factors in (as_given, doubled, None):
        ours = _Ours(layer, each.held, factors, other, behind, by)
        if all(_near(ours, seen, kv) for seen in each.seen):
            return ours
    return None


def _near(ours: _Ours, seen: _Seen, kv: KVCache) -> bool:
    if ours.factors is not None and seen.turn is None:
        return False
    with attention.begin(ours.held.owner, seen.batch, kv):
        try:
            found = ours(seen.x, seen.turn)
        except ValueError:  # of factors that are none of these heads'
            return False
    apart, added = (found - seen.y).norm(dim=-1), (seen.y - seen.x).norm(dim=-1)
    limit = _MOST_OF_FP32 if ours.layer.whole else _MOST_OF_HALF
    return bool((apart <= limit * added).all())


def _calls(ours: _Ours, own: Callable[..., Any]) -> Callable[..., Any]:
    """Ours for a step's rows, else the layer's own code."""
    owner = ours.held.owner

    def forward(x: Tensor, *given: Any, position_embeddings: Any = None, **named: Any) -> Any:
        turn = _turn(x, position_embeddings)
        usual = not given and x.shape[0] == 1 and x.dtype == torch.float32
        usual = usual and (turn is not None or ours.factors is None)
        if usual and owner.found is None and isinstance(owner.step, AttentionStep):
            return ours(x, turn)
        return own(x, *given, position_embeddings=position_embeddings, **named)

    return forward


def _batches(vocab: int) -> list[RaggedBatch]:
    rng, done = np.random.default_rng(0), np.zeros(len(_STEPS[0]), np.int32)
    width = -(-max(map(sum, zip(*_STEPS, strict=True))) // _BLOCK_TOKENS)
    tables = np.arange(len(done) * width, dtype=np.int32).reshape(len(done), width)[::-1]
    found = []
    for step in _STEPS:
        lens = np.array(step, np.int32)
        positions = [torch.arange(at, at + n) for at, n in zip(done.tolist(), step, strict=True)]
        done = done + lens
        tokens = torch.from_numpy(rng.integers(0, vocab, lens.sum()))
        wanted = torch.arange(len(tokens))
        found.append(RaggedBatch(tokens, torch.cat(positions), lens, done, tables, wanted))
    return found


def _cache(config: ModelConfig) -> KVCache:
    blocks = len(_STEPS[0]) * -(-max(map(sum, zip(*_STEPS, strict=True))) // _BLOCK_TOKENS)
    return KVCache(config, blocks, _BLOCK_TOKENS, torch.float32, "cpu")
