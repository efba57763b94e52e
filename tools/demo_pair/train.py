"""Train the demo pair on the standard library of the interpreter that runs this script.

    python -m tools.demo_pair.train                   # all stages: about two hours on two cores
    python -m tools.demo_pair.train draft evaluate    # some stages, from the files in --work

The target learns to predict the next token. It begins with four layers and grows to twelve. The
draft learns from text first, then from lessons: text that the target mostly wrote itself, with the
target's likeliest tokens at each position. A stage that is killed continues from its checkpoint.
`cbatch/demo/README.md` describes the shipped weights, which an earlier version trained.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from cbatch.cli.parser import CommandParser
from cbatch.demo import demo_paths
from tools.demo_pair.text import (
    END_OF_TEXT,
    VOCAB_SIZE,
    Document,
    Streams,
    choose_prompts,
    function_heads,
    prepare,
)

# (hidden size, layers, heads, KV heads, MLP size). On a CPU a small pass costs time per layer, so
# the draft has one.
TARGET, DRAFT = (256, 12, 8, 4, 352), (128, 1, 4, 2, 384)
FIRST_LAYERS = 4  # layers of the target in the first half of its budget
TARGET_ROWS, CONTEXT_TOKENS = 8, 256  # per step
DRAFT_ROWS = 8
DECAY_SHARE = 0.3  # last share of a budget, in which the learning rate falls to zero
WARMUP_STEPS = 40
LESSON_ROWS, LESSON_PROMPT_TOKENS = 64, 96
TOP_TOKENS = 64  # likeliest tokens of the target, stored for each position of a lesson
ARGMAX_WEIGHT = 0.5  # weight of the cross-entropy to the target's argmax
TEXT_SHARE, LESSON_SHARE = 0.1, 0.4  # of --draft-minutes; training on lessons gets the rest
CHECKPOINT_EVERY_S = 150.0
CONTINUED_TOKENS = 96  # per held-out prompt


def make_net(
    shape: tuple[int, int, int, int, int], num_layers: int | None = None
) -> LlamaForCausalLM:
    """Return a Llama with random weights and heads of 32."""
    hidden_size, layers, num_heads, num_kv_heads, intermediate_size = shape
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def grow(net: LlamaForCausalLM, num_layers: int) -> LlamaForCausalLM:
    """Return a deeper net that computes the same function.

    Copies follow each layer. Their output projections are zero, so they add nothing at first.
    """
    config = LlamaConfig(**net.config.to_dict() | {"num_hidden_layers": num_layers})
    deeper = LlamaForCausalLM(config)
    deeper.model.embed_tokens.load_state_dict(net.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(net.model.norm.state_dict())
    copies = num_layers // net.config.num_hidden_layers
    for index, layer in enumerate(deeper.model.layers):
        layer.load_state_dict(net.model.layers[index // copies].state_dict())
        if index % copies:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper


class Training:
    """A net, its optimizers (Muon for matrices, AdamW for the rest) and its progress."""

    def __init__(self, net: LlamaForCausalLM, checkpoint: Path) -> None:
        self.checkpoint, self.step, self.elapsed_s = checkpoint, 0, 0.0
        self.adopt(net)
        if checkpoint.exists():
            state = torch.load(checkpoint)
            if (layers := state["layers"]) != net.config.num_hidden_layers:
                self.adopt(grow(net, layers))
            self.net.load_state_dict(state["net"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.elapsed_s = state["step"], state["elapsed_s"]
            self.warm_from_step = state["warm_from_step"]

    def adopt(self, net: LlamaForCausalLM) -> None:
        """Replace the net. Its optimizers are new, and warm up from this step."""
        self.net, self.warm_from_step = net, self.step
        named = list(net.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=0.015),
            torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._base_rates = [0.015, 2e-3]

    def update(self, loss: Tensor, share: float, decay_share: float = DECAY_SHARE) -> None:
        """Take one optimizer step. `share` of the budget is spent."""
        loss.backward()
        warmup = min(1.0, (self.step - self.warm_from_step + 1) / WARMUP_STEPS)
        decay = min(1.0, (1.0 - share) / decay_share) if decay_share else 1.0
        for optimizer, rate in zip(self.optimizers, self._base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * warmup * decay
            optimizer.step()
            optimizer.zero_grad()

    def save(self) -> None:
        """Write the checkpoint in one operation, so that a killed run leaves the previous one."""
        state = {
            "net": self.net.state_dict(),
            "layers": self.net.config.num_hidden_layers,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "warm_from_step": self.warm_from_step,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def run(self, label: str, seconds: float, steps: int | None, step: Callable[[float], float]):
        """Call `step(share)` until the budget in seconds or steps is spent."""
        saved_s = self.elapsed_s
        while self.elapsed_s < seconds and self.step < (steps or math.inf):
            start = time.perf_counter()
            share = max(self.elapsed_s / seconds, self.step / steps if steps else 0.0)
            figure = step(share)
            self.step += 1
            self.elapsed_s += time.perf_counter() - start
            if self.step % 20 == 0:
                print(f"{label} {share:6.1%} step {self.step} {figure:.3f}", flush=True)
            if self.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
                self.save()
                saved_s = self.elapsed_s
        self.save()


def text_loss(net: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return the mean next-token loss on rows [n, length + 1]."""
    return F.cross_entropy(net(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())


def train_target(streams: Streams, work: Path, seconds: float, steps: int | None, seed: int):
    """Return the target, trained on text."""
    torch.manual_seed(seed)
    training = Training(make_net(TARGET, FIRST_LAYERS), work / "target.pt")

    def step(share: float) -> float:
        if share >= 0.5 and training.net.config.num_hidden_layers < TARGET[1]:
            training.adopt(grow(training.net, TARGET[1]))
        rows = streams.draw(TARGET_ROWS, seed, training.step, share < 1 - DECAY_SHARE)
        loss = text_loss(training.net, rows)
        training.update(loss, share)
        return loss.item()

    training.run("target", seconds, steps, step)
    return training.net


class Lessons(NamedTuple):
    """Rows of text [n, context + 1], and the target's likeliest tokens [n, context, 64] after each
    position with their logits."""

    rows: Tensor
    top_ids: Tensor
    top_logits: Tensor


@torch.inference_mode()
def continue_prompts(net, prompts: list[list[int]], num_tokens: int, temperature: float = 0.0):
    """Return the continuations of prompts of one length, [n, num_tokens]; no token ends a row."""
    ids = torch.tensor(prompts)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    out = net.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **sampling or {"do_sample": False},
    )
    return out[:, ids.shape[1] :]


@torch.inference_mode()
def write_lessons(target, streams: Streams, heads: list[list[int]], seconds: float, seed: int):
    """Return lessons of batches of 64 rows, made for `seconds`, at least four batches.

    Of every four batches, two are greedy continuations, one is sampled and one is real text.
    """
    torch.manual_seed(seed)
    heads = sorted(heads, key=len)
    batches = [heads[i : i + LESSON_ROWS] for i in range(0, len(heads), LESSON_ROWS)]
    random.Random(seed).shuffle(batches)
    lessons, deadline = [], time.perf_counter() + seconds
    for index, batch in enumerate(batches):
        if index >= 4 and time.perf_counter() > deadline:
            break
        if index % 4 == 3:
            rows = streams.draw(LESSON_ROWS, seed + 2, index)
        else:
            shortest = min(map(len, batch))
            prompts = [prompt[-shortest:] for prompt in batch]
            temperature = 0.8 if index % 4 == 2 else 0.0
            new = continue_prompts(
                target, prompts, streams.context_tokens + 1 - shortest, temperature
            )
            rows = torch.cat([torch.tensor(prompts), new], dim=1)
        top = target(rows[:, :-1]).logits.topk(TOP_TOKENS)
        lessons.append(Lessons(rows.short(), top.indices.short(), top.values.half()))
        print(f"lesson {index + 1} of at most {len(batches)}", flush=True)
    return Lessons(*map(torch.cat, zip(*lessons, strict=True)))


def lesson_loss(net: LlamaForCausalLM, lessons: Lessons, rows: Tensor) -> tuple[Tensor, float]:
    """Return the loss on chosen rows, and the share of positions with the target's argmax.

    The loss mixes the cross-entropy to the target's likeliest tokens, which is the divergence
    from the target up to a constant, with the one to its argmax.
    """
    logits = net(lessons.rows[rows, :-1].long()).logits
    log_probs, top_ids = F.log_softmax(logits, dim=-1), lessons.top_ids[rows].long()
    top_probs = torch.softmax(lessons.top_logits[rows].float(), dim=-1)
    soft = -(top_probs * log_probs.gather(-1, top_ids)).sum(-1).mean()
    choice = top_ids[..., 0]
    hard = F.nll_loss(log_probs.flatten(0, 1), choice.flatten())
    agreement = (logits.argmax(-1) == choice).float().mean().item()
    return (1 - ARGMAX_WEIGHT) * soft + ARGMAX_WEIGHT * hard, agreement


def train_draft(target, streams, heads, work: Path, seconds: float, steps: int | None, seed: int):
    """Return the draft: trained on text, then on lessons of the target."""
    torch.manual_seed(seed)
    net = make_net(DRAFT)
    # Most of a draft's weights are its embedding: it begins as a projection of the target's.
    embedding = target.model.embed_tokens.weight.detach()
    directions = torch.linalg.svd(embedding, full_matrices=False).Vh[: DRAFT[0]]
    net.model.embed_tokens.weight.data = embedding @ directions.T
    on_text = Training(net, work / "draft-text.pt")

    def text_step(share: float) -> float:
        loss = text_loss(on_text.net, streams.draw(DRAFT_ROWS, seed + 1, on_text.step, True))
        on_text.update(loss, share, decay_share=0.0)  # training on lessons continues from here
        return loss.item()

    on_text.run("draft on text", seconds * TEXT_SHARE, steps, text_step)
    lesson_file = work / "lessons.pt"
    if not lesson_file.exists():
        lessons = write_lessons(target, streams, heads, seconds * LESSON_SHARE, seed)
        torch.save(lessons._asdict(), lesson_file)
    lessons = Lessons(**torch.load(lesson_file))
    training = Training(on_text.net, work / "draft.pt")

    def lesson_step(share: float) -> float:
        generator = torch.Generator().manual_seed(seed * 7_000_003 + training.step)
        rows = torch.randint(0, len(lessons.rows), (DRAFT_ROWS,), generator=generator)
        loss, agreement = lesson_loss(training.net, lessons, rows)
        training.update(loss, share)
        return agreement

    training.run("draft", seconds * (1 - TEXT_SHARE - LESSON_SHARE), steps, lesson_step)
    return training.net


@torch.inference_mode()
def agreements(target, draft, prompts: list[list[int]]) -> list[list[bool]]:
    """Return for each prompt whether the draft's argmax is the next token of the target's greedy
    text. The draft reads the target's tokens, as in verification."""
    rows = []
    for prompt in prompts:
        new = continue_prompts(target, [prompt], CONTINUED_TOKENS)[0].tolist()
        count = new.index(0) + 1 if 0 in new else len(new)
        choices = draft(torch.tensor([prompt + new[: count - 1]])).logits[0, len(prompt) - 1 :]
        rows.append([a == b for a, b in zip(choices.argmax(-1).tolist(), new[:count], strict=True)])
    return rows


@torch.inference_mode()
def evaluate(target, draft, tokenizer: Tokenizer, held_out: Iterable[Document]) -> dict:
    """Return the loss in nats per token, and the greedy acceptance, of each held-out module."""
    by_module: dict[str, list[Document]] = defaultdict(list)
    for document in held_out:
        by_module[document.module.split(".")[0]].append(document)
    figures = {}
    for module, documents in by_module.items():
        stream = [0] + [i for d in documents for i in tokenizer.encode(d.text).ids]
        rows = [torch.tensor([stream[i : i + 513]]) for i in range(0, len(stream) - 1, 512)]
        nats = sum(text_loss(target, row).item() * (row.shape[1] - 1) for row in rows)
        heads = [head for d in documents for head, _ in function_heads(d)][:12]
        prompts = [encoding.ids for encoding in tokenizer.encode_batch(heads)]
        hits = [hit for row in agreements(target, draft, prompts) for hit in row]
        acceptance = sum(hits) / len(hits) if hits else None
        figures[module] = {"nats": nats / (len(stream) - 1), "acceptance": acceptance}
        print(f"{module:12} {figures[module]}", flush=True)
    return figures


def save_pretrained(net: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder in Hugging Face layout, with bf16 weights."""
    net.to(torch.bfloat16).save_pretrained(folder)
    net.float()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_pretrained(folder: Path) -> LlamaForCausalLM:
    """Return a stored net in fp32, with the bf16 values that the engine serves."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


STAGES = ("prompts", "target", "draft", "evaluate")


def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints")
    parser.add_argument("--out", type=Path, default=demo_paths()[0].parent)
    parser.add_argument("--text", type=Path, help="a folder of modules; default the library")
    parser.add_argument("--target-minutes", type=float, default=90.0)
    parser.add_argument("--draft-minutes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, help="end each training at this step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"stages: unknown {', '.join(sorted(unknown))}; use {', '.join(STAGES)}")
    stages = args.stages or STAGES
    logging.set_verbosity_error()
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer, streams, documents = prepare(args.work, args.text, args.seed, CONTEXT_TOKENS)
    held_out = [d for d in documents if d.is_held_out]
    if "prompts" in stages:
        prompts = json.dumps(choose_prompts(held_out), indent=1, ensure_ascii=False)
        (args.out / "prompts.json").write_text(prompts + "\n", encoding="utf-8")
    if "target" in stages:
        target = train_target(streams, args.work, args.target_minutes * 60, args.steps, args.seed)
        save_pretrained(target, tokenizer, args.out / "target")
    if "draft" in stages:
        texts = [h for d in documents if not d.is_held_out for h, _ in function_heads(d)]
        heads = [e.ids[-LESSON_PROMPT_TOKENS:] for e in tokenizer.encode_batch(texts)]
        target = load_pretrained(args.out / "target")
        seconds = args.draft_minutes * 60
        draft = train_draft(target, streams, heads, args.work, seconds, args.steps, args.seed)
        save_pretrained(draft, tokenizer, args.out / "draft")
    if "evaluate" in stages:
        pair = [load_pretrained(args.out / name) for name in ("target", "draft")]
        print(json.dumps(evaluate(*pair, tokenizer, held_out)))


if __name__ == "__main__":
    main()
