from __future__ import annotations

import dataclasses

import pytest
import torch

from tools.demo_pair.checkpoint import load_pretrained, save_pretrained
from tools.demo_pair.nets import TARGET, Llama
from tools.demo_pair.optim import orthogonalise
from tools.demo_pair.parallel import Workers
from tools.demo_pair.sample import generate
from tools.demo_pair.tokenizer import END_OF_TEXT, train_tokenizer

SMALL = dataclasses.replace(TARGET, num_layers=2, vocab_size=300)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Llama(SMALL).init_weights().eval()


def test_logits_equal_transformers(net, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer(["x = 1\n"])
    save_pretrained(net, tokenizer, tmp_path)
    ids = torch.randint(0, 256, (2, 70))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = load_pretrained(tmp_path)
    with torch.inference_mode():
        expected, got = reference(ids).logits, loaded(ids)
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


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_orthogonalise_flattens_the_spectrum(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, *shape)))
    assert values.max() < 1.3
    assert values.median() > 0.6


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
