"""Token streams and the windows that training cuts from them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_pair.data import Corpus, Document, load_corpus, total_bytes
from tools.demo_pair.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

TEST_SHARE = 0.2  # mean share of a batch's windows that are test code


@dataclass(frozen=True)
class Streams:
    """Packed documents: library and test code for training, [tokens] int32 each."""

    library: Tensor
    tests: Tensor


def pack(tokenizer: Tokenizer, documents: Iterable[Document], seed: int) -> Tensor:
    """Return the ids of all documents in a seeded order, each followed by the end token."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in shuffled]):
        ids += [*encoding.ids, end]
    return torch.tensor(ids, dtype=torch.int32)


def prepare(work: Path, seed: int) -> tuple[Tokenizer, Streams, Corpus]:
    """Return tokenizer, packed streams and corpus, which are built once and kept under `work`."""
    corpus_file = work / "corpus.pt"
    if not corpus_file.exists():
        corpus = load_corpus()
        library = [d for d in corpus.train if not d.is_test]
        tokenizer = train_tokenizer(d.text for d in library)
        save_tokenizer(tokenizer, work / "tokenizer")
        streams = Streams(
            pack(tokenizer, library, seed),
            pack(tokenizer, [d for d in corpus.train if d.is_test], seed),
        )
        print(
            f"library {len(library)} files, {total_bytes(library):,} bytes, "
            f"{streams.library.numel():,} tokens; tests {streams.tests.numel():,} tokens; "
            f"near-duplicates dropped {corpus.dropped_bytes:,} of {corpus.raw_bytes:,} bytes",
            flush=True,
        )
        torch.save((streams, corpus), corpus_file)
    streams, corpus = torch.load(corpus_file, weights_only=False)
    return load_tokenizer(work / "tokenizer"), streams, corpus


def windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `count` random windows [count, length] int64 of a packed stream."""
    starts = torch.randint(0, stream.numel() - length, (count, 1), generator=generator)
    return stream[starts + torch.arange(length)].long()


def draw(streams: Streams, step: int, seed: int, count: int, length: int, tests: bool) -> Tensor:
    """Return the batch of a step. It depends on (seed, step) alone, so a restart repeats it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    num_tests = int((torch.rand(count, generator=generator) < TEST_SHARE).sum()) if tests else 0
    parts = [windows(streams.library, count - num_tests, length, generator)]
    if num_tests:
        parts.append(windows(streams.tests, num_tests, length, generator))
    return torch.cat(parts)
