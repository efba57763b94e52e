"""A decoder's layer in one call, against its operations written out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.cpu.compiled import CompiledProduct
from cbatch.runtime.cpu.compiled.experts import Gating
from cbatch.runtime.cpu.compiled.fused_layer import FusedLayer, Gated, LayerNorms
from cbatch.runtime.cpu.compiled.layer_attention import (
    CompiledAttention,
    LayerAttention,
    LayerShape,
)
from cbatch.runtime.cpu.compiled.rows import RowNorm
from tests.runtime.marks import needs_compiler
from tests.runtime.test_layer_attention import Made, reference
from tests.runtime.test_rows import drawn, rotated

pytestmark = needs_compiler

HIDDEN, INNER, LENGTH = 48, 37, 21  # no whole vectors
SHAPE = LayerShape(heads=4, kv_heads=2, key_dim=12, value_dim=12, scale=0.3)
ALL_OF_IT = SHAPE._replace(
    value_dim=10, window=9, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])
)


class Case(NamedTuple):
    shape: LayerShape = SHAPE
    norms: str = "before before_forward"
    head_norm: str = ""  # of a head, of a row
    turned: int = 12
    gating: Gating | None = Gating.SILU
    by: float = 1.0
    offset: float = 0.0


CASES = {
    "as most are": Case(),
    "norms all around": Case(norms="before behind before_forward behind_forward", offset=1.0),
    "norms behind": Case(norms="behind behind_forward", gating=Gating.GELU_TANH),
    "no norms": Case(norms=""),
    "heads normed": Case(head_norm="head", turned=6),
    "rows of heads normed": Case(head_norm="row"),
    "nothing turns": Case(turned=0, by=0.3),
    "all that attention has": Case(shape=ALL_OF_IT),
    "another's feed-forward": Case(gating=None, by=0.3),
}


class Built(NamedTuple):
    case: Case
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    norms: dict[str, Tensor]
    layer: FusedLayer


def built(case: Case, dtype: torch.dtype) -> Built:
    of = case.shape
    qkv = (of.heads + of.kv_heads) * of.key_dim + of.kv_heads * of.value_dim
    sizes = {"qkv": (qkv, HIDDEN), "out": (HIDDEN, of.heads * of.value_dim)}
    sizes |= {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    weights = {
        name: (drawn(*size, seed=i) * 0.3).to(dtype) for i, (name, size) in enumerate(sizes.items())
    }
    biases = {name: drawn(size[0], seed=9) for name, size in sizes.items()}
    products = {n: CompiledProduct(weight, biases[n], None) for n, weight in weights.items()}
    widths = dict.fromkeys(case.norms.split(), HIDDEN)
    if case.head_norm:
        counts = {"query": of.heads, "key": of.kv_heads}
        widths |= {
            n: of.key_dim * (count if case.head_norm == "row" else 1) for n, count in counts.items()
        }
    norms = {n: 1 + 0.2 * drawn(width, seed=3) for n, width in widths.items()}
    rows = {name: RowNorm(weight, 1e-3, case.offset) for name, weight in norms.items()}
    forward = None
    if case.gating is not None:
        forward = Gated(products["gate_up"], products["down"], case.gating)
    parts = products["qkv"], products["out"], LayerAttention(of), LayerNorms(**rows), forward
    return Built(case, weights, biases, norms, FusedLayer(*parts, case.by))


def expected(of: Built, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """h and y of rows x [T, hidden] of one sequence, in fp64."""
    case, shape = of.case, of.case.shape

    def norm(name: str, x: Tensor) -> Tensor:
        if name not in of.norms:
            return x
        weight = of.norms[name].double() + case.offset
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, of.weights[name].double(), of.biases[name].double())

    def heads(name: str, x: Tensor, count: int) -> Tensor:
        if case.head_norm == "row":
            x = norm(name, x)
        x = x.unflatten(-1, (count, -1)).transpose(0, 1)
        x = norm(name, x) if case.head_norm == "head" else x
        return rotated(x, cos.double(), sin.double()) if case.turned else x

    widths = [n * shape.key_dim for n in (shape.heads, shape.kv_heads)]
    widths.append(shape.kv_heads * shape.value_dim)
    q, k, v = product("qkv", norm("before", x.double())).split(widths, -1)
    values = v.unflatten(-1, (shape.kv_heads, -1)).transpose(0, 1)
    made = Made(heads("query", q, shape.heads), heads("key", k, shape.kv_heads), values)
    attended = reference(shape, made).flatten(1)
    h = x + case.by * norm("behind", product("out", attended))
    normed = norm("before_forward", h)
    if case.gating is None:
        return h, normed
    gate, up = product("gate_up", normed).chunk(2, -1)
    gated = F.silu(gate) if case.gating is Gating.SILU else F.gelu(gate, approximate="tanh")
    return h, h + case.by * norm("behind_forward", product("down", gated * up))


class Running:
    """Sequences of LENGTH rows over a cache of their own."""

    def __init__(self, of: Built, sequences: int, dtype: torch.dtype) -> None:
        shape, self.of = of.case.shape, of
        width = -(-LENGTH // 4)
        self.tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)[::-1]
        numbers = 4 * (shape.key_dim + shape.value_dim)
        self.blocks = torch.full((shape.kv_heads * self.tables.size, numbers), 1e4, dtype=dtype)
        self.attention = CompiledAttention()
        self.x = drawn(sequences, LENGTH, HIDDEN, seed=5)
        turned = of.case.turned
        self.cos, self.sin = (drawn(sequences, LENGTH, turned, seed=n) for n in (6, 7))

    def step(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor | None]:
        """Rows [start, end) of sequences, in one step."""
        x, cos, sin = (
            torch.cat([whole[i, start:end] for i, start, end in parts])[None]
            for whole in (self.x, self.cos, self.sin)
        )
        with self.attention.step(
            np.array([end - start for _, start, end in parts]),
            np.array([end for *_, end in parts]),
            self.tables[[i for i, *_ in parts]],
            num_blocks=self.tables.size,
            block_size=4,
        ) as step:
            turn = (cos, sin) if self.of.case.turned else None
            given = x.clone()
            found = self.of.layer(step, self.blocks, x, turn)
        assert torch.equal(x, given)  # it is the caller's
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_operations(name: str, dtype: torch.dtype) -> None:
    of = built(CASES[name], dtype)
    running = Running(of, 2, dtype)
    running.step([(0, 0, 13), (1, 0, 20)])
    y, normed = running.step([(1, 20, 21), (0, 13, 21)])
    for i, rows in ((1, y[0, :1]), (0, y[0, 1:])):
        h, wanted = expected(of, running.x[i], running.cos[i], running.sin[i])
        if CASES[name].gating is None:
            assert normed is not None
            mine = normed[0, :1] if i else normed[0, 1:]
            near(mine, wanted[-len(rows) :], dtype)
            wanted = h
        near(rows, wanted[-len(rows) :], dtype)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 5e-2  # softmax may be sharp
    assert (found - wanted).norm() < limit * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["as most are", "norms all around", "another's feed-forward"])
def test_a_row_has_its_own_bits(name: str, dtype: torch.dtype) -> None:
    """In company and alone, by one thread and by several."""
    of, threads = built(CASES[name], dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole = Running(of, 12, dtype).step([(i, 0, LENGTH) for i in range(12)])[0][0]
        torch.set_num_threads(1)
        for i in (0, 11):
            alone = Running(of, 12, dtype)
            parts = [alone.step([(i, a, b)])[0][0] for a, b in ((0, 1), (1, 20), (20, LENGTH))]
            assert torch.equal(torch.cat(parts), whole[i * LENGTH : (i + 1) * LENGTH])
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_fit_is_told() -> None:
    of = built(CASES["as most are"], torch.float32)
    running = Running(of, 1, torch.float32)
    changes: list[tuple[Any, str]] = [
        ({"x": torch.zeros(1, LENGTH, HIDDEN - 1)}, "x: "),
        ({"cos": torch.zeros(1, LENGTH, 14), "sin": torch.zeros(1, LENGTH, 14)}, "turn: 14 of 12"),
        ({"sin": torch.zeros(1, LENGTH - 1, 12)}, "turn: .* for 21 rows"),
        ({"blocks": torch.zeros(3)}, "blocks: 3 of"),
    ]
    for change, said in changes:
        kept = {name: getattr(running, name) for name in change}
        vars(running).update(change)
        with pytest.raises(ValueError, match=said):
            running.step([(0, 0, LENGTH)])
        vars(running).update(kept)
    product = CompiledProduct(torch.zeros(HIDDEN, HIDDEN), None, None)
    norm = LayerNorms(before=RowNorm(torch.ones(HIDDEN - 1), 1e-5))
    qkv = CompiledProduct(of.weights["qkv"], None, None)
    for parts, said in (
        ((product, product, LayerAttention(SHAPE), LayerNorms(), None), "products: of"),
        ((qkv, product, LayerAttention(SHAPE), norm, None), "norms: of other rows"),
    ):
        with pytest.raises(ValueError, match=said):
            FusedLayer(*parts)
