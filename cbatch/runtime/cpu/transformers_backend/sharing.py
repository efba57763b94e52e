"""The shard of a transformers model on one rank, by transformers' own plan (`base_model_tp_plan`).

The plan splits some products by rows and others by columns, as `sharding` does for our own pass.
Every rank computes everything else. Plans are written for torch's own tensor parallelism; here our
products and `RankGroup` implement them. The self-test at every load checks the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cbatch.core.request.errors import FieldError
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.shapes import columns_per_rank
from cbatch.runtime.model.sharding import FIELD
from cbatch.runtime.rank_group import RankGroup

_ROWS, _GATHERED = "colwise", "colwise_gather_output"
_COLUMNS, _CUT = "rowwise", "rowwise_split_input"
_HALVES, _EXPERTS = "packed_colwise", "moe_tp_experts"
# Not split: embeddings, norms of a head, and MLA's weights that all heads share.
_WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_KNOWN = (_ROWS, _GATHERED, _COLUMNS, _CUT, _HALVES, _EXPERTS, *_WHOLE)
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
_REMEDY = "leave it out"


def check_shared(path: Path, size: int) -> None:
    """Raise FieldError if `size` ranks cannot divide the model, by `config.json` alone."""
    from transformers import AutoConfig

    _checked_plan(AutoConfig.from_pretrained(path), size)


def _checked_plan(config: Any, size: int) -> dict[str, str]:
    """Return the plan of the model without its LM head. Raises FieldError if unsupported."""
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    kind = config.model_type
    if not any(style not in _WHOLE for style in plan.values()):
        problem = f"transformers has no plan for sharding {kind}"
        raise FieldError(FIELD, problem, _REMEDY)
    for name, style in plan.items():
        if style not in _KNOWN:
            problem = f"the plan of {kind} asks for {style} of {name}, which is not supported"
            raise FieldError(FIELD, problem, _REMEDY)
    if any(style == _ROWS and "att" in name for name, style in plan.items()):
        for field in _HEADS:
            count = getattr(config, field, None)
            if isinstance(count, int) and count % size:
                problem = f"{size} does not divide the model's {field}, {count}"
                raise FieldError(FIELD, problem, _REMEDY)
    return plan | _halved(plan)


def _halved(plan: dict[str, str]) -> dict[str, str]:
    """Return the entries of a plan to replace for fused gate and up projections. The plan gathers
    their output and splits it again for the next product. A rank with a part of both halves needs
    neither step."""
    halved = {}
    for name, style in plan.items():
        mlp, _, last = name.rpartition(".")
        down = f"{mlp}.down_proj"
        if last == "gate_up_proj" and style == _GATHERED and plan.get(down) == _CUT:
            halved |= {name: _HALVES, down: _COLUMNS}
    return halved


class _Planned(NamedTuple):
    """A module or parameter `name` of `owner`, with its full `path` and its style of splitting."""

    path: str
    owner: nn.Module
    name: str
    style: str

    @property
    def target(self) -> Any:
        return getattr(self.owner, self.name)


class Shares:
    """Narrows the weights of `net`, a model as loaded by transformers, to those of this rank. After
    its modules are replaced by ours, `complete` joins the partial results of the ranks."""

    def __init__(self, net: nn.Module, ranks: RankGroup) -> None:
        """Narrow the weights. Raises FieldError if a weight cannot be divided."""
        self._ranks = ranks
        plan = _checked_plan(net.config, ranks.size)
        planned = list(_planned(net.base_model, net.base_model_prefix, plan))
        if not planned:
            problem = f"the plan of {net.config.model_type} matches none of its modules"
            raise FieldError(FIELD, problem, _REMEDY)
        planned += _planned(net, "", dict(type(net)._tp_plan or {}))
        self._joins = [entry for entry in planned if entry.style in (_GATHERED, _COLUMNS, _CUT)]
        self._joins = [entry for entry in self._joins if isinstance(entry.target, nn.Linear)]
        self._joins += [entry for entry in planned if entry.style == _EXPERTS]
        self._outputs = {p.path: p.target.out_features for p in self._joins if p.style == _GATHERED}
        for entry in planned:
            self._narrow(entry)

    def _narrow(self, at: _Planned) -> None:
        target = at.target
        if isinstance(target, nn.Linear):
            if at.style in (_ROWS, _GATHERED):
                _replace(target, "weight", self._part(at, target.weight, 0))
                if target.bias is not None:
                    _replace(target, "bias", self._part(at, target.bias, 0))
            elif at.style == _HALVES:
                for name in ("weight", "bias"):
                    if getattr(target, name) is not None:
                        _replace(target, name, self._half_parts(at, getattr(target, name), 0))
            elif at.style in (_COLUMNS, _CUT):
                _replace(target, "weight", self._part(at, target.weight, 1))
                if target.bias is not None and self._ranks.rank:  # only rank 0 adds the bias
                    _replace(target, "bias", torch.zeros_like(target.bias))
        elif at.style == _EXPERTS:
            if getattr(target, "has_bias", False) or getattr(target, "is_transposed", False):
                problem = f"{at.path}: experts with biases or transposed weights cannot be sharded"
                raise FieldError(FIELD, problem, _REMEDY)
        elif isinstance(target, nn.Parameter) and at.style == _HALVES:
            _replace(at.owner, at.name, self._half_parts(at, target, 1))
        elif isinstance(target, nn.Parameter) and at.style == _COLUMNS:
            _replace(at.owner, at.name, self._part(at, target, target.dim() - 1))
        else:
            problem = f"{at.path}: the plan asks for {at.style} of a {type(target).__name__}"
            raise FieldError(FIELD, problem, _REMEDY)

    def _half_parts(self, at: _Planned, whole: Tensor, along: int) -> Tensor:
        """Return this rank's share of the gates and of the ups, which are concatenated."""
        return torch.cat([self._part(at, half, along) for half in whole.chunk(2, along)], along)

    def _part(self, at: _Planned, whole: Tensor, along: int) -> Tensor:
        """Return a copy of this rank's part: a view would keep the whole tensor. An LM head is
        padded with zero rows if it cannot be divided evenly."""
        size, count = self._ranks.size, whole.shape[along]
        if count % size and not (at.style == _GATHERED and at.path in _HEAD_NAMES):
            problem = f"{size} does not divide the {count} of {at.path}"
            raise FieldError(FIELD, problem, _REMEDY)
        count_per_rank = columns_per_rank(count, size)
        part = (
            whole.detach()
            .narrow(along, *_span(self._ranks.rank * count_per_rank, count_per_rank, count))
            .clone()
        )
        if part.shape[along] == count_per_rank:
            return part
        missing = list(part.shape)
        missing[along] = count_per_rank - part.shape[along]
        return torch.cat([part, part.new_zeros(missing)], dim=along)

    def complete(self, net: nn.Module) -> None:
        """Join partial results, after products, experts and feed-forwards are ours. Raises
        ModelError if a path of the plan no longer names a module."""
        modules = dict(net.named_modules())
        for at in self._joins:
            parent, _, name = at.path.rpartition(".")
            owner = modules[parent]
            module = getattr(owner, name, None)
            if isinstance(module, Joined):
                continue
            if not isinstance(module, nn.Module):
                raise ModelError(f"{at.path}: it cannot be sharded as it is computed here")
            setattr(owner, name, Joined(module, self._join_of(at)))

    def _join_of(self, at: _Planned) -> Join:
        ranks = self._ranks
        if at.style == _GATHERED:
            return Join(None, lambda y: _gathered(ranks, y, self._outputs[at.path]))
        if at.style == _CUT:
            return Join(lambda x: x.chunk(ranks.size, -1)[ranks.rank], ranks.sum)
        return Join(None, ranks.sum)


class Join(NamedTuple):
    """The functions around a rank's part of a module: `take` cuts its input (None: the whole
    input), `put` combines its output with the outputs of the other ranks."""

    take: Callable[[Tensor], Tensor] | None
    put: Callable[[Tensor], Tensor]


class Joined(nn.Module):
    """A module of which each rank computes a part."""

    def __init__(self, part: nn.Module, join: Join) -> None:
        super().__init__()
        self.part, self._join = part, join
        # For code that reads the type of the weight; a product's weight has no contents.
        self.weight, self.bias = getattr(part, "weight", None), None

    def forward(self, x: Tensor, *given: Any, **more: Any) -> Tensor:
        taken = x if self._join.take is None else self._join.take(x)
        return self._join.put(self.part(taken, *given, **more))


_HEAD_NAMES = ("lm_head",)


def _planned(root: nn.Module, prefix: str, plan: dict[str, str]) -> Iterator[_Planned]:
    """Yield the modules and parameters of `root` that the plan names."""
    before = f"{prefix}." if prefix else ""
    for name, module in root.named_modules():
        inside = f"{name}." if name else ""
        for child, _ in (*module.named_children(), *module.named_parameters(recurse=False)):
            path = inside + child
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
            if style is not None and style not in _WHOLE:
                yield _Planned(before + path, module, child, style)


def _replace(owner: nn.Module, name: str, part: Tensor) -> None:
    setattr(owner, name, nn.Parameter(part, requires_grad=False))


def _span(start: int, count: int, end: int) -> tuple[int, int]:
    """Return start and length of the part of [start, start + count) that lies before `end`."""
    first = min(start, end)
    return first, min(count, end - first)


def _gathered(ranks: RankGroup, mine: Tensor, count: int) -> Tensor:
    """Concatenate [..., n] of each rank; return the first `count` columns."""
    rows = mine.reshape(-1, mine.shape[-1])
    return ranks.columns(rows, count).view(*mine.shape[:-1], count)
