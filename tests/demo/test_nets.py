from __future__ import annotations

import dataclasses

import pytest
import torch

from cbatch.demo.checkpoint import load_pretrained, save_pretrained
from cbatch.demo.nets import DRAFT, TARGET, KVCache, Llama
from cbatch.demo.optim import Optimizers, orthogonalise, wsd_scale
from cbatch.demo.parallel import Workers
from cbatch.demo.sample import cut_at, generate
from cbatch.demo.tokenizer import END_OF_TEXT, train_tokenizer

SMALL = dataclasses.replace(TARGET, num_layers=2, vocab_size=300)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Llama(SMALL).init_weights().eval()


def test_shapes_keep_the_promised_sizes():
    sizes = [sum(p.numel() for p in Llama(shape).parameters()) for shape in (TARGET, DRAFT)]
    assert 5e6 <= sizes[0] <= 10e6
    assert sizes[1] < 1e6
    assert 2 * sum(sizes) < 15.5e6


def test_logits_equal_transformers(net, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer(["x = 1\n"])
    save_pretrained(net, tokenizer, tmp_path)
    ids = torch.randint(0, 256, (2, 70))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = load_pretrained(tmp_path)
    with torch.inference_mode():
        expected, got = reference(ids).logits, ours(ids)
    assert got.std() > 0
    assert (got - expected).abs().max() < 1e-4 * expected.std()
    assert reference.config.eos_token_id == tokenizer.token_to_id(END_OF_TEXT)


def test_cached_ragged_generation_equals_full_passes(net):
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    got = generate(net, prompts, 12)
    for prompt, new in zip(prompts, got, strict=True):
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(net(torch.tensor([ids]))[0, -1].argmax()))
        assert new == ids[len(prompt) :]


def test_padding_changes_no_logits(net):
    ids = torch.tensor([[3, 4, 5]])
    padded = torch.tensor([[0, 0, 3, 4, 5]])
    with torch.inference_mode():
        alone = net(ids)
        beside = net(padded, KVCache(SMALL, torch.tensor([2]), 5))
    torch.testing.assert_close(beside[:, 2:], alone, atol=1e-5, rtol=1e-5)


def test_sampling_repeats_by_seed_and_differs_between_seeds(net):
    first, again, other = (generate(net, [[1, 2]], 20, 1.0, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_cut_at():
    assert cut_at([4, 5, 0, 6], 0) == [4, 5]
    assert cut_at([4, 5], 0) == [4, 5]


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_orthogonalise_flattens_the_spectrum(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, *shape)))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_optimizers_learn_a_batch_and_restore(net):
    ids = torch.randint(0, 300, (2, 33))

    def loss(part):
        logits = net(part[:, :-1])
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        return value, value

    net.train()
    workers = Workers(2)
    optimizers = Optimizers(net, 0.02, 3e-3, workers)
    params = list(net.parameters())
    before = loss(ids)[0].item()
    for _ in range(10):
        workers.backward(loss, ids, params, 1)
        optimizers.step(1.0)
    assert loss(ids)[0].item() < 0.8 * before
    other = Optimizers(net, 0.02, 3e-3, workers)
    other.load_state_dict(optimizers.state_dict())
    assert len(other.muon.state) == len(optimizers.muon.state) > 0


def test_microbatches_add_up_to_the_whole_batch(net):
    params = list(net.parameters())
    ids = torch.randint(0, 300, (6, 20))

    def losses(part):
        value = net(part).square().mean()
        return value, value

    value, statistic = Workers(2).backward(losses, ids, params, 2)
    got = [param.grad.clone() for param in params]
    net.zero_grad()
    whole = losses(ids)[0]
    whole.backward()
    assert value == statistic == pytest.approx(whole.item(), rel=1e-5)
    for gradient, param in zip(got, params, strict=True):
        torch.testing.assert_close(gradient, param.grad, atol=1e-6, rtol=1e-3)


def test_schedule_warms_up_holds_and_decays_to_zero():
    assert wsd_scale(0.0, 0) < 0.1
    assert wsd_scale(0.5, 500) == 1.0
    assert wsd_scale(0.875, 500) == pytest.approx(0.5)
    assert wsd_scale(1.0, 500) == 0.0
