"""Tokens from logits: the kernels compared with their reference, and with the CPU runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling.filters import Filters, filtered_probs
from cbatch.runtime.sampling.logits_processors import processors_of
from cbatch.runtime.sampling.rejection_sampler import NoiseRows, draw
from tests.triton_kernels.interpreter.batches import SMALL, RequestSpec, kept_by, random_batch
from tests.triton_kernels.sampling_reference import sample_reference, shaped_logits
from triton_kernels.sampling import launch
from triton_kernels.sampling.inputs import COUPLED, GREEDY, REJECTION, Distributions, LogitsBatch
from triton_kernels.sampling.launch import Tiling
from triton_kernels.sampling.mask import mask_logits, mask_reference, words_of

PIECEMEAL = Tiling(pieces=1, piece=32, chunk=1, list_tokens=64)  # rows have two tiles or more

pytestmark = [
    pytest.mark.usefixtures("device", "unchecked_sums"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def reference_tokens(batch: LogitsBatch) -> Tensor:
    logits, rows, requests, where, drafts, shaping = batch
    return sample_reference(logits, rows, requests, where, drafts, shaping, noise.BONUS)


def drawn(batch: LogitsBatch, purpose: int = noise.BONUS, tiling: Tiling = SMALL) -> Distributions:
    """Draw without changing the logits."""
    return launch.draw(batch._replace(logits=batch.logits.clone()), purpose, tiling)


def sample(batch: LogitsBatch, tiling: Tiling = SMALL) -> Tensor:
    return drawn(batch, tiling=tiling).tokens[:, 0]


def runtime_tokens(
    batch: LogitsBatch, specs: list[RequestSpec], vocab: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens and distributions of `cbatch.runtime`: processors, filters, then the
    draw."""
    of = batch.rows.requests.long()
    rows = []
    for row, b, depth in zip(batch.logits.float(), of.tolist(), batch.rows.depths, strict=True):
        spec, start = specs[b], int(batch.drafts.starts[b])
        chain = processors_of(spec.params, spec.stop_ids, spec.prompt, vocab)
        for token in [*spec.output, *batch.drafts.tokens[start : start + int(depth)].tolist()]:
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


@pytest.mark.parametrize(
    ("dtype", "shaped"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)]
)
def test_unfiltered_tokens_are_those_of_the_cpu_runtime(dtype: torch.dtype, shaped: bool) -> None:
    rng = np.random.default_rng(3)
    batch, specs = random_batch(rng, 10, 97, filters=False, shaped=shaped, dtype=dtype)
    tokens = sample(batch)
    assert torch.equal(tokens, reference_tokens(batch))
    assert torch.equal(tokens, runtime_tokens(batch, specs, 97)[0])


@pytest.fixture(scope="module")
def everything() -> tuple[LogitsBatch, list[RequestSpec]]:
    """Return a batch with every parameter in use; rows and lists are longer than a tile."""
    batch, specs = random_batch(np.random.default_rng(34), 10, 42)
    assert int(batch.shaping.num_listed.max()) >= PIECEMEAL.tile / 2
    modes = batch.requests.modes[batch.rows.requests.long()]
    assert all((modes == mode).sum() > 5 for mode in (GREEDY, COUPLED, REJECTION))
    return batch, specs


def test_filtered_tokens_are_those_of_the_cpu_runtime(
    everything: tuple[LogitsBatch, list[RequestSpec]],
) -> None:
    batch, specs = everything
    tokens = sample(batch, PIECEMEAL)
    assert torch.equal(tokens, reference_tokens(batch))
    assert torch.equal(tokens, runtime_tokens(batch, specs, 42)[0])
    # The filters have an effect: without them other tokens come.
    free = batch.requests._replace(
        top_k=torch.full_like(batch.requests.top_k, 42),
        top_p=torch.full_like(batch.requests.top_p, torch.inf),
        min_p=torch.zeros_like(batch.requests.min_p),
    )
    assert (tokens != reference_tokens(batch._replace(requests=free))).sum() > 5


def test_cuts_and_masses_are_those_of_the_cpu_runtime(
    everything: tuple[LogitsBatch, list[RequestSpec]],
) -> None:
    """Rows of the ratio test keep the same tokens, ties at the edge included; the mass agrees
    within 1e-6."""
    batch, specs = everything
    _, probs = runtime_tokens(batch, specs, 42)
    x = shaped_logits(batch.logits, batch.rows, batch.drafts, batch.shaping)
    draws = drawn(batch, noise.DRAFT)
    y, kept = kept_by(draws, batch, x)
    mass = draws.floats[:, 1]
    ratio = batch.requests.modes[batch.rows.requests.long()] == REJECTION
    assert torch.equal(kept[ratio], (probs > 0)[ratio])
    assert ((y == y.gather(1, (y * kept).argmax(1, keepdim=True))) & ~kept)[ratio].any()
    expected = (torch.exp(-y) * kept).sum(dim=-1)
    torch.testing.assert_close(mass[ratio], expected[ratio], rtol=1e-6, atol=0)


def test_a_row_depends_on_itself_and_not_on_the_tiling() -> None:
    """A row gives the same token alone, in another order, and in other tiles."""
    batch, _ = random_batch(np.random.default_rng(5), 6, 40, shaped=False)
    together = sample(batch)
    assert torch.equal(together, sample(batch, PIECEMEAL))
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(0))
    rows = type(batch.rows)(*(field[order].contiguous() for field in batch.rows))
    shuffled = batch._replace(logits=batch.logits[order], rows=rows)
    assert torch.equal(sample(shuffled), together[order])
    one = batch._replace(
        logits=batch.logits[3:4], rows=type(rows)(*(field[3:4] for field in batch.rows))
    )
    assert torch.equal(sample(one), together[3:4])


def test_ties_go_to_the_lowest_id_also_across_tiles() -> None:
    batch, _ = random_batch(np.random.default_rng(6), 8, 48, filters=False, shaped=False)
    modes = torch.full_like(batch.requests.modes, GREEDY)
    flat = batch._replace(
        logits=torch.zeros_like(batch.logits), requests=batch.requests._replace(modes=modes)
    )
    flat.logits[:, 40] = flat.logits[:, 21] = 1.0
    assert (sample(flat, PIECEMEAL) == 21).all()


def test_rows_that_are_not_finite_are_reported_and_change_no_other() -> None:
    batch, _ = random_batch(np.random.default_rng(7), 6, 40, shaped=False)
    before = drawn(batch)
    broken = batch._replace(logits=batch.logits.clone())
    broken.logits[0, 3] = torch.nan
    broken.logits[2, :] = torch.nan
    broken.logits[5, 39] = torch.inf
    broken.logits[7, 0] = -torch.inf
    after = drawn(broken)
    bad = torch.tensor([0, 2, 5, 7])
    finite = torch.ones_like(after.tokens[:, 1])
    finite[bad] = 0
    assert torch.equal(after.tokens[:, 1], finite) and (before.tokens[:, 1] == 1).all()
    good = finite > 0
    assert torch.equal(after.tokens[good], before.tokens[good])
    assert ((after.tokens[:, 0] >= 0) & (after.tokens[:, 0] < 40)).all()


def test_forbidden_tokens_are_marked_and_a_finite_row_stays_so() -> None:
    """The scan marks rows that are not plain, the shaping marks penalised drafts; nothing else is
    marked."""
    batch, _ = random_batch(np.random.default_rng(11), 8, 40)
    left = batch._replace(logits=batch.logits.clone())
    assert (launch.draw(left, noise.BONUS, SMALL).tokens[:, 1] == 1).all()
    marked = left.logits == torch.finfo(left.logits.dtype).min
    assert torch.equal(left.logits[~marked], batch.logits[~marked])
    words = batch.shaping.plain[batch.rows.requests.long()].repeat_interleave(32, dim=1)[:, :40]
    plain = (words >> (torch.arange(40) % 32)) & 1 > 0
    assert marked[~plain].all()
    drafted = marked & plain
    assert drafted.any() and (drafted.sum(dim=1) <= batch.rows.depths).all()


def test_fields_are_checked_by_name() -> None:
    batch, _ = random_batch(np.random.default_rng(10), 3, 40)
    wrong = {
        "logits": batch._replace(logits=batch.logits.double()),
        r"rows\.depths": batch._replace(rows=batch.rows._replace(depths=batch.rows.depths.long())),
        r"noise\.keys": batch._replace(noise=batch.noise._replace(keys=batch.noise.keys[:, :1])),
    }
    for name, bad in wrong.items():
        with pytest.raises(ValueError, match=name):
            sample(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_forbids_what_its_bits_say(dtype: torch.dtype) -> None:
    vocab, generator = 4100, torch.Generator().manual_seed(3)
    logits = torch.randn(6, vocab, generator=generator).to(dtype)
    logits[1, 7], logits[4, 4099] = float("nan"), float("-inf")
    rows = torch.randint(-(2**31), 2**31, (5, words_of(vocab)), generator=generator).int()
    # Slot 2 has two rows from 1 on, and no third; slot 0 has one, the fourth.
    rows[:, :2] = torch.tensor([[2, 0], [2, 1], [2, 2], [0, 0], [1, 0]])
    starts, counts = torch.tensor([4, 0, 1]).int(), torch.tensor([1, 0, 2]).int()
    expected = logits.clone()
    mask_reference(expected, rows, starts, counts)
    mask_logits(logits, rows, starts, counts)
    assert torch.equal(logits.nan_to_num(nan=3.0), expected.nan_to_num(nan=3.0))
    masked = (logits == torch.finfo(dtype).min).sum(dim=1)
    assert (masked[[1, 2, 4]] > vocab // 3).all() and not masked[[0, 3, 5]].any()
