"""Train the tests' tiny hybrid with an MTP head (layout of Qwen3.5) on the text of the demo pair.

    python -m tools.tiny_hybrid                  # about an hour on one core
    python -m tools.tiny_hybrid mtp              # a stage, from the files in --work

The target learns to predict the next token of Python's standard library, with four layers first,
then with sixteen. Then the head learns the target's choices, mostly on its own continuations. From
its second draft on, the head reads its own output. A stage that is killed continues.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from cbatch import LLM, SamplingParams
from cbatch.cli.parser import CommandParser
from cbatch.demo import demo_paths
from tools.demo_pair.text import VOCAB_SIZE, Document, Streams, function_heads, prepare
from tools.demo_pair.train import CONTEXT_TOKENS, TARGET_ROWS, Training, text_loss

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "tiny_hybrid"
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_hidden_layers": 16,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
FIRST_LAYERS, FIRST_SHARE = 4, 0.6  # of the target, in this share of its budget
STAGES = ("target", "mtp")
DEPTHS = 3  # drafts in a row that the head is trained for
HARD_SHARE = 0.5  # weight of the target's likeliest token; its distribution has the rest
TEXT_ROWS = 2  # rows of text among the `TARGET_ROWS` of a step of the head
LESSONS = 2000  # continuations by the target
PROMPT_TOKENS = 64  # of a function's beginning, which the target continues


class Mtp(nn.Module):
    """The head: fc over [norm(embedding), norm(state)], a layer with attention, a norm."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        with_attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, with_attention)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)

    def forward(self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        pair = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        x = self.fc(torch.cat(pair, dim=-1))
        x = self.layers[0](x, position_embeddings=angles, attention_mask=None)
        return self.norm(x)


class Hybrid(nn.Module):
    """The target `net` and its head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.config = Qwen3_5TextConfig(**FIELDS | {"num_hidden_layers": num_layers})
        self.net = Qwen3_5ForCausalLM(self.config)
        self.mtp = Mtp(self.net.config)

    def drafts(self, rows: Tensor, states: Tensor) -> list[Tensor]:
        """Return for each depth the head's outputs [n, length - 1 - depth, hidden]: the i-th
        predicts token i + 2 + depth of its row. `states` are the target's, after its last norm."""
        embedded, outputs = self.net.model.embed_tokens(rows), []
        for depth in range(DEPTHS):
            states, tokens = states[:, : rows.shape[1] - 1 - depth], embedded[:, 1 + depth :]
            positions = torch.arange(tokens.shape[1]).expand(3, len(rows), -1)
            angles = self.net.model.rotary_emb(tokens, positions)
            states = self.mtp(tokens, states, angles)
            outputs.append(states)
        return outputs


def head_loss(hybrid: Hybrid, rows: Tensor) -> tuple[Tensor, list[float]]:
    """Return the loss of the drafts on rows [n, length], and the share of each depth's drafts that
    are the target's choice."""
    with torch.no_grad():
        states = hybrid.net.model(rows).last_hidden_state
        logits = hybrid.net.lm_head(states)
    head, losses, shares = hybrid.net.lm_head.weight.detach(), [], []
    for depth, output in enumerate(hybrid.drafts(rows, states)):
        target = logits[:, 1 + depth :].flatten(0, 1)
        log_probs = F.log_softmax(output.flatten(0, 1) @ head.T, dim=-1)
        choice = target.argmax(-1)
        soft = -(target.softmax(-1) * log_probs).sum(-1).mean()
        losses.append(HARD_SHARE * F.nll_loss(log_probs, choice) + (1 - HARD_SHARE) * soft)
        shares.append((log_probs.argmax(-1) == choice).float().mean().item())
    return torch.stack(losses).sum(), shares


def save(hybrid: Hybrid, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"": hybrid.net, "mtp.": hybrid.mtp}
    tensors = {
        prefix + name: tensor.bfloat16().contiguous()
        for prefix, part in parts.items()
        for name, tensor in part.state_dict().items()
        if name != "lm_head.weight"  # the embedding
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    config = {**kind, **FIELDS, "dtype": "bfloat16", "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Hybrid:
    """Return a stored hybrid in fp32, with the bf16 values that the engine serves."""
    hybrid, parts = Hybrid(FIELDS["num_hidden_layers"]), {True: {}, False: {}}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts[name.startswith("mtp.")][name.removeprefix("mtp.")] = tensor.float()
    parts[False]["lm_head.weight"] = parts[False]["model.embed_tokens.weight"]
    hybrid.net.load_state_dict(parts[False])
    hybrid.mtp.load_state_dict(parts[True])
    return hybrid


def grow(net: Qwen3_5ForCausalLM) -> Qwen3_5ForCausalLM:
    """Return the net with all layers, which computes the same: the output projections of those
    that it did not have are zero."""
    whole = Hybrid(FIELDS["num_hidden_layers"]).net
    whole.load_state_dict(net.state_dict(), strict=False)
    for layer in whole.model.layers[len(net.model.layers) :]:
        mixer = (
            layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
        )
        for last in (mixer, layer.mlp.down_proj):
            nn.init.zeros_(last.weight)
    return whole


def train_target(streams: Streams, work: Path, seconds: float, steps: int | None) -> Hybrid:
    torch.manual_seed(0)
    file = work / "target.pt"
    hybrid = Hybrid(torch.load(file)["layers"] if file.exists() else FIRST_LAYERS)
    training = Training(hybrid.net, file)

    def step(share: float) -> float:
        if share >= FIRST_SHARE and training.net.config.num_hidden_layers == FIRST_LAYERS:
            hybrid.net = grow(training.net)
            training.adopt(hybrid.net)
        rows = streams.draw(TARGET_ROWS, 0, training.step)
        loss = text_loss(training.net, rows)
        training.update(loss, share)
        return loss.item()

    training.run("target", seconds, steps, step)
    return hybrid


def write_lessons(folder: Path, heads: list[list[int]]) -> Tensor:
    """Return rows of beginnings of functions, each continued greedily by the stored target."""
    llm = LLM(folder, tokenizer="none", lookahead="off", threads=1, max_num_seqs=32)
    prompts = [head[-PROMPT_TOKENS:] for head in heads if len(head) >= PROMPT_TOKENS][:LESSONS]
    new_tokens = CONTEXT_TOKENS + 1 - PROMPT_TOKENS
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    pairs = zip(prompts, outputs, strict=True)
    return torch.tensor([prompt + [*output.token_ids] for prompt, output in pairs])


def train_head(
    folder: Path, streams: Streams, lessons: Tensor, work: Path, seconds: float, steps: int | None
) -> Hybrid:
    torch.manual_seed(0)
    hybrid = load(folder)
    hybrid.net.requires_grad_(False)
    hybrid.mtp.config = hybrid.config
    training = Training(hybrid.mtp, work / "mtp.pt")

    def step(share: float) -> float:
        generator = torch.Generator().manual_seed(training.step)
        chosen = torch.randint(0, len(lessons), (TARGET_ROWS - TEXT_ROWS,), generator=generator)
        rows = torch.cat([lessons[chosen], streams.draw(TEXT_ROWS, 1, training.step)])
        loss, shares = head_loss(hybrid, rows)
        training.update(loss, share)
        if training.step % 20 == 19:
            print(" ".join(f"{each:.2f}" for each in shares), flush=True)
        return loss.item()

    training.run("mtp", seconds, steps, step)
    return hybrid


def beginnings(documents: list[Document], tokenizer: Any) -> list[list[int]]:
    texts = [source for d in documents if not d.is_held_out for _, source in function_heads(d)]
    return [encoding.ids[:PROMPT_TOKENS] for encoding in tokenizer.encode_batch(texts)]


def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--work", type=Path, default=Path("build/tiny_hybrid"), help="checkpoints")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--text", type=Path, help="a folder of modules; default the library")
    parser.add_argument("--target-minutes", type=float, default=40.0)
    parser.add_argument("--mtp-minutes", type=float, default=15.0)
    parser.add_argument("--steps", type=int, help="end each training at this step")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer_file = demo_paths()[0] / "tokenizer.json"
    tokenizer, streams, documents = prepare(args.work, args.text, 0, CONTEXT_TOKENS, tokenizer_file)
    if "target" in (args.stages or STAGES):
        hybrid = train_target(streams, args.work, 60 * args.target_minutes, args.steps)
        save(hybrid, args.out)
    if "mtp" in (args.stages or STAGES):
        file = args.work / "lessons.pt"
        if not file.exists():
            heads = beginnings(documents, tokenizer)
            torch.save(write_lessons(args.out, heads), file)
        hybrid = train_head(
            args.out, streams, torch.load(file), args.work, 60 * args.mtp_minutes, args.steps
        )
        save(hybrid, args.out)


if __name__ == "__main__":
    main()
