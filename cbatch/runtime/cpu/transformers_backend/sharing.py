"""A transformers model as one of several ranks holds it, by the plan that transformers has for it
(`base_model_tp_plan`): rows of some products and columns of others, as in `sharding` for our own
pass. What a plan leaves out, or has to be whole, every rank computes alike.

Plans are written for torch's own tensor parallelism. What they ask for is done by our products and
`RankGroup`; whether the result is the model is seen by the self-test of every load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cbatch.core.request.errors import FieldError
from cbatch.runtime.cpu.rank_group import RankGroup
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.sharding import FIELD, columns_per_rank

_ROWS, _GATHERED = "colwise", "colwise_gather_output"
_COLUMNS, _CUT = "rowwise", "rowwise_split_input"
_HALVES, _EXPERTS = "packed_colwise", "moe_tp_experts"
# Left as they are, on every rank: embeddings, norms of a head, and what MLA keeps for all heads.
_WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_KNOWN = (_ROWS, _GATHERED, _COLUMNS, _CUT, _HALVES, _EXPERTS, *_WHOLE)
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
_REMEDY = "leave it out"


def check_shared(path: Path, size: int) -> None:
    """By `config.json` alone. Raises `FieldError` where `size` ranks do not share the model out."""
    from transformers import AutoConfig

    _checked_plan(AutoConfig.from_pretrained(path), size)


def _checked_plan(config: Any, size: int) -> dict[str, str]:
    """Of the model below its head."""
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    kind = config.model_type
    if not any(style not in _WHOLE for style in plan.values()):
        problem = f"transformers has no plan for {kind} that shares products out"
        raise FieldError(FIELD, problem, _REMEDY)
    for name, style in plan.items():
        if style not in _KNOWN:
            problem = f"the plan of {kind} asks for {style} of {name}, which is not known here"
            raise FieldError(FIELD, problem, _REMEDY)
    if any(style == _ROWS and "att" in name for name, style in plan.items()):
        for field in _HEADS:
            count = getattr(config, field, None)
            if isinstance(count, int) and count % size:
                problem = f"{size} does not divide the model's {field}, {count}"
                raise FieldError(FIELD, problem, _REMEDY)
    return plan | _halved(plan)


def _halved(plan: dict[str, str]) -> dict[str, str]:
    """Gates and ups in one product are put side by side by plans, to be cut again before the next:
    a rank that has its share of each half needs neither."""
    found = {}
    for name, style in plan.items():
        mlp, _, last = name.rpartition(".")
        down = f"{mlp}.down_proj"
        if last == "gate_up_proj" and style == _GATHERED and plan.get(down) == _CUT:
            found |= {name: _HALVES, down: _COLUMNS}
    return found


class _Planned(NamedTuple):
    """A module or parameter `name` of `owner`; `path` tells of it."""

    path: str
    owner: nn.Module
    name: str
    style: str

    @property
    def held(self) -> Any:
        return getattr(self.owner, self.name)


class Shares:
    """Narrows the weights of `net`, a model as transformers has loaded it, to those of this rank.
    Once its modules are ours, `complete` puts together what ranks compute of it."""

    def __init__(self, net: nn.Module, ranks: RankGroup) -> None:
        """Raises `FieldError` for what cannot be shared out."""
        self._ranks = ranks
        plan = _checked_plan(net.config, ranks.size)
        found = list(_planned(net.base_model, net.base_model_prefix, plan))
        if not found:
            problem = f"the plan of {net.config.model_type} names nothing that is in it"
            raise FieldError(FIELD, problem, _REMEDY)
        found += _planned(net, "", dict(type(net)._tp_plan or {}))
        self._joins = [each for each in found if each.style in (_GATHERED, _COLUMNS, _CUT)]
        self._joins = [each for each in self._joins if isinstance(each.held, nn.Linear)]
        self._joins += [each for each in found if each.style == _EXPERTS]
        self._outputs = {p.path: p.held.out_features for p in self._joins if p.style == _GATHERED}
        for each in found:
            self._narrow(each)

    def _narrow(self, at: _Planned) -> None:
        held = at.held
        if isinstance(held, nn.Linear):
            if at.style in (_ROWS, _GATHERED):
                _replace(held, "weight", self._part(at, held.weight, 0))
                if held.bias is not None:
                    _replace(held, "bias", self._part(at, held.bias, 0))
            elif at.style == _HALVES:
                for name in ("weight", "bias"):
                    if getattr(held, name) is not None:
                        _replace(held, name, self._half_parts(at, getattr(held, name), 0))
            elif at.style in (_COLUMNS, _CUT):
                _replace(held, "weight", self._part(at, held.weight, 1))
                if held.bias is not None and self._ranks.rank:  # of sums, which one rank adds
                    _replace(held, "bias", torch.zeros_like(held.bias))
        elif at.style == _EXPERTS:
            if getattr(held, "has_bias", False) or getattr(held, "is_transposed", False):
                problem = f"{at.path}: experts with biases, or turned around, are not shared out"
                raise FieldError(FIELD, problem, _REMEDY)
        elif isinstance(held, nn.Parameter) and at.style == _HALVES:
            _replace(at.owner, at.name, self._half_parts(at, held, 1))
        elif isinstance(held, nn.Parameter) and at.style == _COLUMNS:
            _replace(at.owner, at.name, self._part(at, held, held.dim() - 1))
        else:
            problem = f"{at.path}: the plan asks for {at.style} of a {type(held).__name__}"
            raise FieldError(FIELD, problem, _REMEDY)

    def _half_parts(self, at: _Planned, whole: Tensor, along: int) -> Tensor:
        """Of gates, then ups, its share of each."""
        return torch.cat([self._part(at, half, along) for half in whole.chunk(2, along)], along)

    def _part(self, at: _Planned, whole: Tensor, along: int) -> Tensor:
        """A copy: a view would hold all of it. Rows of a head that are too many are 0."""
        size, count = self._ranks.size, whole.shape[along]
        if count % size and not (at.style == _GATHERED and at.path in _HEAD_NAMES):
            problem = f"{size} does not divide the {count} of {at.path}"
            raise FieldError(FIELD, problem, _REMEDY)
        each = columns_per_rank(count, size)
        part = whole.detach().narrow(along, *_span(self._ranks.rank * each, each, count)).clone()
        if part.shape[along] == each:
            return part
        missing = list(part.shape)
        missing[along] = each - part.shape[along]
        return torch.cat([part, part.new_zeros(missing)], dim=along)

    def complete(self, net: nn.Module) -> None:
        """Once products, experts and feed-forwards are ours. Raises ModelError where a module that
        takes part was replaced by one that is not known here."""
        modules = dict(net.named_modules())
        for at in self._joins:
            parent, _, name = at.path.rpartition(".")
            owner = modules[parent]
            held = getattr(owner, name, None)
            if isinstance(held, Joined):
                continue
            if not isinstance(held, nn.Module):
                raise ModelError(f"{at.path}: it cannot be shared out as it is computed here")
            setattr(owner, name, Joined(held, self._join_of(at)))

    def _join_of(self, at: _Planned) -> Join:
        ranks = self._ranks
        if at.style == _GATHERED:
            return Join(None, lambda y: _beside(ranks, y, self._outputs[at.path]))
        if at.style == _CUT:
            return Join(lambda x: x.chunk(ranks.size, -1)[ranks.rank], ranks.sum)
        return Join(None, ranks.sum)


class Join(NamedTuple):
    """What a rank takes of an input that is whole, None: all; and what it makes of its output with
    the others'."""

    take: Callable[[Tensor], Tensor] | None
    put: Callable[[Tensor], Tensor]


class Joined(nn.Module):
    """A module of which each rank computes a part."""

    def __init__(self, part: nn.Module, join: Join) -> None:
        super().__init__()
        self.part, self._join = part, join
        # For who asks for its type: of a product there is nothing in it.
        self.weight, self.bias = getattr(part, "weight", None), None

    def forward(self, x: Tensor, *given: Any, **more: Any) -> Tensor:
        taken = x if self._join.take is None else self._join.take(x)
        return self._join.put(self.part(taken, *given, **more))


_HEAD_NAMES = ("lm_head",)


def _planned(root: nn.Module, prefix: str, plan: dict[str, str]) -> Iterator[_Planned]:
    """What of `root` its plan names; below modules are parameters of theirs."""
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
    """Of `count` from `start` on what is there."""
    first = min(start, end)
    return first, min(count, end - first)


def _beside(ranks: RankGroup, mine: Tensor, count: int) -> Tensor:
    """[..., count] of [..., some] of each rank."""
    rows = mine.reshape(-1, mine.shape[-1])
    return ranks.columns(rows, count).view(*mine.shape[:-1], count)
