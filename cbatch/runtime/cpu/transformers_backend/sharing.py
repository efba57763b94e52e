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
_COLUMNS, _SPLIT_INPUT = "rowwise", "rowwise_split_input"
_HALVES, _EXPERTS = "packed_colwise", "moe_tp_experts"
# Not split: embeddings, norms of a head, and MLA's weights that all heads share.
_WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_KNOWN = (_ROWS, _GATHERED, _COLUMNS, _SPLIT_INPUT, _HALVES, _EXPERTS, *_WHOLE)
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
    """Return the changes of a plan for fused gate and up projections. The plan gathers their output
    and splits it again; a rank with a part of each half needs neither step."""
    halved = {}
    for name, style in plan.items():
        mlp, _, last = name.rpartition(".")
        down = f"{mlp}.down_proj"
        if last == "gate_up_proj" and style == _GATHERED and plan.get(down) == _SPLIT_INPUT:
            halved |= {name: _HALVES, down: _COLUMNS}
    return halved


class _PlannedWeight(NamedTuple):
    """A module or parameter `name` of `owner`, with its full `path` and its style of splitting."""

    path: str
    owner: nn.Module
    name: str
    style: str

    @property
    def target(self) -> Any:
        return getattr(self.owner, self.name)


class RankShard:
    """Narrows the weights of `net`, a model as loaded by transformers, to this rank's shard. Once
    its modules are replaced by ours, `complete` lets them join the partial results of ranks."""

    def __init__(self, net: nn.Module, ranks: RankGroup) -> None:
        """Narrow the weights. Raises FieldError if a weight cannot be divided."""
        self._ranks = ranks
        plan = _checked_plan(net.config, ranks.size)
        planned = list(_planned(net.base_model, net.base_model_prefix, plan))
        if not planned:
            problem = f"the plan of {net.config.model_type} matches none of its modules"
            raise FieldError(FIELD, problem, _REMEDY)
        planned += _planned(net, "", dict(type(net)._tp_plan or {}))
        styles = _GATHERED, _COLUMNS, _SPLIT_INPUT
        linears = [each for each in planned if isinstance(each.target, nn.Linear)]
        self._partial = [each for each in linears if each.style in styles]
        self._partial += [each for each in planned if each.style == _EXPERTS]
        self._outputs = {p.path: p.target.out_features for p in linears if p.style == _GATHERED}
        for entry in planned:
            self._narrow(entry)

    def _narrow(self, entry: _PlannedWeight) -> None:
        target = entry.target
        if isinstance(target, nn.Linear):
            if entry.style in (_ROWS, _GATHERED):
                _replace(target, "weight", self._part(entry, target.weight, 0))
                if target.bias is not None:
                    _replace(target, "bias", self._part(entry, target.bias, 0))
            elif entry.style == _HALVES:
                for name in ("weight", "bias"):
                    if getattr(target, name) is not None:
                        _replace(target, name, self._half_parts(entry, getattr(target, name), 0))
            elif entry.style in (_COLUMNS, _SPLIT_INPUT):
                _replace(target, "weight", self._part(entry, target.weight, 1))
                if target.bias is not None and self._ranks.rank:  # only rank 0 adds the bias
                    _replace(target, "bias", torch.zeros_like(target.bias))
        elif entry.style == _EXPERTS:
            if getattr(target, "has_bias", False) or getattr(target, "is_transposed", False):
                problem = (
                    f"{entry.path}: experts with biases or transposed weights cannot be sharded"
                )
                raise FieldError(FIELD, problem, _REMEDY)
        elif isinstance(target, nn.Parameter) and entry.style == _HALVES:
            _replace(entry.owner, entry.name, self._half_parts(entry, target, 1))
        elif isinstance(target, nn.Parameter) and entry.style == _COLUMNS:
            _replace(entry.owner, entry.name, self._part(entry, target, target.dim() - 1))
        else:
            problem = f"{entry.path}: the plan asks for {entry.style} of a {type(target).__name__}"
            raise FieldError(FIELD, problem, _REMEDY)

    def _half_parts(self, entry: _PlannedWeight, whole: Tensor, along: int) -> Tensor:
        return torch.cat([self._part(entry, half, along) for half in whole.chunk(2, along)], along)

    def _part(self, entry: _PlannedWeight, whole: Tensor, along: int) -> Tensor:
        """Return a copy of this rank's part: a view would keep the whole tensor. An LM head is
        padded with zero rows if it cannot be divided evenly."""
        size, count = self._ranks.size, whole.shape[along]
        if count % size and not (entry.style == _GATHERED and entry.path in _HEAD_NAMES):
            problem = f"{size} does not divide the {count} of {entry.path}"
            raise FieldError(FIELD, problem, _REMEDY)
        count_per_rank = columns_per_rank(count, size)
        part = (
            whole.detach()
            .narrow(along, *_span(self._ranks.rank * count_per_rank, count_per_rank, count))
            .clone()
        )
        if part.shape[along] == count_per_rank:
            return part
        padding = list(part.shape)
        padding[along] = count_per_rank - part.shape[along]
        return torch.cat([part, part.new_zeros(padding)], dim=along)

    def complete(self, net: nn.Module) -> None:
        """Let modules join their partial results. Call it once products, experts and feed-forwards
        are ours. Raises ModelError if a path of the plan no longer names a module."""
        modules = dict(net.named_modules())
        for entry in self._partial:
            parent, _, name = entry.path.rpartition(".")
            owner = modules[parent]
            module = getattr(owner, name, None)
            if isinstance(module, Joined):
                continue
            if not isinstance(module, nn.Module):
                raise ModelError(f"{entry.path}: it cannot be sharded as it is computed here")
            setattr(owner, name, Joined(module, self._join_of(entry)))

    def _join_of(self, entry: _PlannedWeight) -> Join:
        ranks = self._ranks
        if entry.style == _GATHERED:
            return Join(None, lambda y: _gathered(ranks, y, self._outputs[entry.path]))
        if entry.style == _SPLIT_INPUT:
            return Join(lambda x: x.chunk(ranks.size, -1)[ranks.rank], ranks.sum)
        return Join(None, ranks.sum)


class Join(NamedTuple):
    """The functions around a rank's part of a module: `split_input` cuts the input (None: the part
    reads the whole input), `combine_output` combines the output with those of other ranks."""

    split_input: Callable[[Tensor], Tensor] | None
    combine_output: Callable[[Tensor], Tensor]


class Joined(nn.Module):
    """A module of which each rank computes a part."""

    def __init__(self, part: nn.Module, join: Join) -> None:
        super().__init__()
        self.part, self._join = part, join
        # For code that reads the type of the weight; a product's weight has no contents.
        self.weight, self.bias = getattr(part, "weight", None), None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own_input = x if self._join.split_input is None else self._join.split_input(x)
        return self._join.combine_output(self.part(own_input, *args, **kwargs))


_HEAD_NAMES = ("lm_head",)


def _planned(root: nn.Module, prefix: str, plan: dict[str, str]) -> Iterator[_PlannedWeight]:
    path_prefix = f"{prefix}." if prefix else ""
    for name, module in root.named_modules():
        module_prefix = f"{name}." if name else ""
        for child, _ in (*module.named_children(), *module.named_parameters(recurse=False)):
            path = module_prefix + child
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
            if style is not None and style not in _WHOLE:
                yield _PlannedWeight(path_prefix + path, module, child, style)


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
