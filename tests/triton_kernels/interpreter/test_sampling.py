"""Tokens from logits: the kernels against their reference, and against the CPU runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.runtime.cpu.filters import Filters, filtered_probs
from cbatch.runtime.sampling.logits_processors import processors_of
from tests.triton_kernels.interpreter.batches import Asked, kept_by, random_batch
from triton_kernels.noise import host as noise
from triton_kernels.sampling import reduce, tiles
from triton_kernels.sampling.inputs import COUPLED, GREEDY, REJECTION, LogitsBatch
from triton_kernels.sampling.launch import Tiling, reduce_tiles, sample
from triton_kernels.sampling.reference import sample_reference, shaped_logits
from triton_kernels.verification.reference import NoiseRows, draw

SMALL = Tiling(256, 16, 16, 2, 64)
TILING = Tiling(256, 64, 64, 1, 64)

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def reference_tokens(batch: LogitsBatch) -> Tensor:
    logits, rows, requests, where, drafts, shaping = batch
    return sample_reference(logits, rows, requests, where, drafts, shaping, noise.BONUS)


def runtime_tokens(batch: LogitsBatch, asked: list[Asked], vocab: int) -> tuple[Tensor, Tensor]:
    """The tokens and laws of `cbatch.runtime`: processors, filters, then the draw."""
    of = batch.rows.requests.long()
    rows = []
    for row, b, depth in zip(batch.logits.float(), of.tolist(), batch.rows.depths, strict=True):
        each, start = asked[b], int(batch.drafts.starts[b])
        chain = processors_of(each.params, each.stop_ids, each.prompt, vocab)
        for token in [*each.output, *batch.drafts.tokens[start : start + int(depth)].tolist()]:
            chain.advance(token)
        rows.append(row.clone())
        chain.shape(rows[-1])
    x, requests = torch.stack(rows), batch.requests
    filters = Filters(
        requests.temperatures[of], requests.top_k[of].long(), requests.top_p[of], requests.min_p[of]
    )
    probs = filtered_probs(x, filters)
    positions = batch.noise.positions[of] + batch.rows.depths
    purposes = torch.where(requests.modes[of] == COUPLED, noise.COUPLED, noise.BONUS)
    drawn = draw(
        probs, NoiseRows(batch.noise.keys[of], batch.noise.choices[of], positions), purposes
    )
    return torch.where(requests.modes[of] == GREEDY, x.argmax(dim=-1), drawn).to(torch.int32), probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shaped", [False, True])
def test_unfiltered_tokens_are_those_of_the_cpu_runtime(dtype: torch.dtype, shaped: bool) -> None:
    rng = np.random.default_rng(3)
    batch, asked = random_batch(rng, 60, 97, filters=False, shaped=shaped, dtype=dtype)
    found = sample(batch, noise.BONUS, TILING)
    assert torch.equal(found, reference_tokens(batch))
    assert torch.equal(found, runtime_tokens(batch, asked, 97)[0])


@pytest.fixture(scope="module")
def everything() -> tuple[LogitsBatch, list[Asked]]:
    """Every parameter in use, tiles of 16 tokens, lists longer than a tile."""
    batch, asked = random_batch(np.random.default_rng(3), 40, 36)
    assert int(batch.shaping.num_listed.max()) > SMALL.block
    modes = batch.requests.modes[batch.rows.requests.long()]
    assert all((modes == mode).sum() > 5 for mode in (GREEDY, COUPLED, REJECTION))
    return batch, asked


def test_filtered_tokens_are_those_of_the_cpu_runtime(
    everything: tuple[LogitsBatch, list[Asked]],
) -> None:
    batch, asked = everything
    found = sample(batch, noise.BONUS, SMALL)
    assert torch.equal(found, reference_tokens(batch))
    assert torch.equal(found, runtime_tokens(batch, asked, 36)[0])
    # The filters mattered: without them other tokens would come.
    free = batch.requests._replace(
        top_k=torch.full_like(batch.requests.top_k, 36),
        top_p=torch.full_like(batch.requests.top_p, torch.inf),
        min_p=torch.zeros_like(batch.requests.min_p),
    )
    assert (found != reference_tokens(batch._replace(requests=free))).sum() > 10


def test_cuts_and_masses_are_those_of_the_cpu_runtime(
    everything: tuple[LogitsBatch, list[Asked]],
) -> None:
    """What rows of the ratio test keep, ties at the edge included; the mass within 1e-6."""
    batch, asked = everything
    _, probs = runtime_tokens(batch, asked, 36)
    y, kept, mass = cuts_of(batch, Tiling(256, 32, 32, 2, 64))
    ratio = batch.requests.modes[batch.rows.requests.long()] == REJECTION
    assert torch.equal(kept[ratio], (probs > 0)[ratio])
    assert ((y == y.gather(1, (y * kept).argmax(1, keepdim=True))) & ~kept)[ratio].any()
    wanted = (torch.exp(-y) * kept).sum(dim=-1)
    torch.testing.assert_close(mass[ratio], wanted[ratio], rtol=1e-6, atol=0)


def cuts_of(batch: LogitsBatch, tiling: Tiling) -> tuple[Tensor, Tensor, Tensor]:
    """y of every token and whether it is kept, [N, V], and the kept mass of each row."""
    x = shaped_logits(batch.logits, batch.rows, batch.drafts, batch.shaping)
    result = reduce_tiles(batch, None, tiling)
    return (*kept_by(result, batch, x), result.floats[:, 1])


def test_a_row_depends_on_itself_and_not_on_the_tiling() -> None:
    """Alone, in another order, and in other tiles: the same token."""
    batch, _ = random_batch(np.random.default_rng(5), 12, 40, shaped=False)
    together = sample(batch, noise.BONUS, Tiling(64, 64, 64, 2, 64))
    assert torch.equal(together, sample(batch, noise.BONUS, Tiling(64, 16, 16, 4, 64)))
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(0))
    rows = type(batch.rows)(*(field[order].contiguous() for field in batch.rows))
    shuffled = batch._replace(logits=batch.logits[order], rows=rows)
    assert torch.equal(sample(shuffled, noise.BONUS, Tiling(64, 64, 64, 2, 64)), together[order])
    one = batch._replace(
        logits=batch.logits[3:4], rows=type(rows)(*(field[3:4] for field in batch.rows))
    )
    assert torch.equal(sample(one, noise.BONUS, Tiling(1, 64, 64, 2, 64)), together[3:4])


def test_ties_go_to_the_lowest_id_also_across_tiles() -> None:
    batch, _ = random_batch(np.random.default_rng(6), 8, 48, filters=False, shaped=False)
    modes = torch.full_like(batch.requests.modes, GREEDY)
    flat = batch._replace(
        logits=torch.zeros_like(batch.logits), requests=batch.requests._replace(modes=modes)
    )
    flat.logits[:, 40] = flat.logits[:, 21] = 1.0
    assert (sample(flat, noise.BONUS, SMALL) == 21).all()


def test_rows_that_are_not_finite_are_reported_and_harm_nobody() -> None:
    batch, _ = random_batch(np.random.default_rng(7), 30, 40, shaped=False)
    before = reduce_tiles(batch, noise.BONUS, TILING)
    broken = batch._replace(logits=batch.logits.clone())
    broken.logits[0, 3] = torch.nan
    broken.logits[2, :] = torch.nan
    broken.logits[5, 39] = torch.inf
    broken.logits[7, 0] = -torch.inf
    after = reduce_tiles(broken, noise.BONUS, TILING)
    bad = torch.tensor([0, 2, 5, 7])
    finite = torch.ones_like(after.ids[:, 3])
    finite[bad] = 0
    assert torch.equal(after.ids[:, 3], finite) and (before.ids[:, 3] == 1).all()
    good = finite > 0
    assert torch.equal(after.ids[good], before.ids[good])
    assert ((after.ids[:, 0] >= 0) & (after.ids[:, 0] < 40)).all()


@triton.jit
def without_ties(keys, ids, cut_keys, cut_ids):
    return keys < cut_keys[:, None]


@triton.jit
def noise_by_row(source, ids, tile, num_dense, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    seeds, positions, choices, purposes = source
    rows = tl.arange(0, seeds.shape[0])
    words = tiles.noise_device.tile_words(seeds, tile * BLOCK, rows, choices, purposes, BLOCK)
    return tiles.noise_device.exponential(words)


@triton.jit
def unfiltered(
    passes, source, asks, winner, winner_key, limits, BLOCK: tl.constexpr, SHAPED: tl.constexpr
):
    return winner


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (tiles, "before", without_ties),
        (tiles, "exponentials", noise_by_row),
        (reduce, "_race_until_kept", unfiltered),
    ],
)
def test_broken_draws_are_caught(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, broken: object
) -> None:
    batch, _ = random_batch(np.random.default_rng(8), 60, 40, shaped=False)
    assert torch.equal(sample(batch, noise.BONUS, TILING), reference_tokens(batch))
    monkeypatch.setattr(module, name, broken)
    assert not torch.equal(sample(batch, noise.BONUS, TILING), reference_tokens(batch))


@triton.jit
def always_plain(view, shaping, ids, x):
    return x


@triton.jit
def drafts_unseen(view, shaping, ids):
    return ids * 0


@pytest.mark.parametrize(
    ("name", "broken"), [("_shape_dense", always_plain), ("_times_drafted", drafts_unseen)]
)
def test_broken_shaping_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    batch, _ = random_batch(np.random.default_rng(9), 60, 40, filters=False)
    monkeypatch.setattr(tiles, name, broken)
    assert not torch.equal(sample(batch, noise.BONUS, TILING), reference_tokens(batch))


def test_fields_are_checked_by_name() -> None:
    batch, _ = random_batch(np.random.default_rng(10), 3, 40)
    wrong = {
        "logits": batch._replace(logits=batch.logits.double()),
        r"rows\.depths": batch._replace(rows=batch.rows._replace(depths=batch.rows.depths.long())),
        r"requests\.top_p": batch._replace(
            requests=batch.requests._replace(top_p=batch.requests.top_p[:2])
        ),
        r"noise\.keys": batch._replace(noise=batch.noise._replace(keys=batch.noise.keys[:, :1])),
        r"drafts\.starts": batch._replace(
            drafts=batch.drafts._replace(starts=batch.drafts.starts[None])
        ),
        r"shaping\.plain": batch._replace(
            shaping=batch.shaping._replace(plain=batch.shaping.plain[:, :1])
        ),
    }
    for name, bad in wrong.items():
        with pytest.raises(ValueError, match=name):
            sample(bad, noise.BONUS)
