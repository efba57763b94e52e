"""The text of the demo pair: the standard library without copies, its prompts, its tokenizer."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

HELD_OUT_MODULES = (
    "colorsys", "contextlib", "copy", "csv", "fnmatch", "graphlib", "heapq", "json", "netrc",
    "queue", "sched", "shlex", "statistics", "textwrap", "wave",
)  # fmt: skip
# Tables, generated files and old code: they cost tokens and teach no present-day Python.
SKIPPED_FOLDERS = (
    "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3",
    "idle_test", "tests", "config", "ensurepip", "_sysconfigdata", "bad_coding", "encoded_modules",
)  # fmt: skip
MAX_FILE_BYTES = 400_000
MAX_DIGIT_SHARE = 0.12  # files with a larger share of digits are tables
SHINGLE_LINES = 3  # lines in a run that is compared, to find copies
DUPLICATE_SHARE = 0.7  # a chunk is a copy if this share of its runs was seen before

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# A line break includes the next line's indentation, so every line starts with one token. Names are
# split at underscores, numbers into groups of at most three digits.
SPLIT_PATTERN = (
    r"[ \t]*[\r\n][\r\n \t]*"
    r"| ?_*\p{L}+| ?_+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+"
    r"|\s+(?!\S)|\s+"
)
TEST_SHARE = 0.2  # share of windows that are code of tests, until the learning rate decays
MAX_HEAD_CHARS = 900  # longer heads of functions are no prompts
MIN_BODY_LINES = 3  # functions with fewer lines after the docstring are no prompts


class Document(NamedTuple):
    """A source file without its copies of earlier files. `module` is its dotted name."""

    module: str
    text: str
    is_test: bool
    is_held_out: bool


class Copies:
    """A memory of runs of three normalised lines, which recognises chunks seen before."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def strip(self, source: str) -> str:
        """Return the source without the functions and classes that were mostly seen before."""
        return "".join(chunk for chunk in split_chunks(source) if self._is_new(chunk))

    def _is_new(self, chunk: str) -> bool:
        plain = (re.sub(r"#.*|\s+", "", line) for line in chunk.splitlines())
        lines = [line for line in plain if line]
        runs = {
            hash(tuple(lines[i : i + SHINGLE_LINES])) for i in range(len(lines) - SHINGLE_LINES + 1)
        }
        num_known = len(runs & self._seen)
        self._seen |= runs
        # Chunks under five lines are always kept, because short code is often similar.
        return len(runs) < SHINGLE_LINES or num_known < DUPLICATE_SHARE * len(runs)


def split_chunks(source: str) -> list[str]:
    """Cut a module at its top-level and class-level definitions; the parts join to the source."""
    tree = ast.parse(source)
    bodies = [tree.body] + [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    starts = {0} | {
        min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    lines = source.splitlines(keepends=True)
    bounds = [*sorted(starts), len(lines)]
    return ["".join(lines[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def is_held_out(module: str) -> bool:
    """Return True for a held-out module and for its tests."""
    first, *rest = module.split(".")
    tested = {part.removeprefix("test_") for part in (first, *rest)} if "test" in first else {first}
    return not tested.isdisjoint(HELD_OUT_MODULES)


def read_source(path: Path) -> str | None:
    """Return a file's text without trailing spaces, or None if it is no use for training."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        with tokenize.open(path) as file:
            source = file.read()
        ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None
    if sum(c.isdigit() for c in source) > MAX_DIGIT_SHARE * max(len(source), 1):
        return None
    lines = (line.rstrip() for line in source.expandtabs(8).splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def load_corpus(root: Path | None = None) -> list[Document]:
    """Read the standard library, or any folder of modules, without near copies.

    Held-out modules come first, so training text never copies them; their tests are left out.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not any(part.startswith(SKIPPED_FOLDERS) for part in parts):
            modules[".".join(parts).removesuffix(".__init__")] = path
    copies, documents = Copies(), []
    order = sorted(modules, key=lambda name: (not is_held_out(name), name.startswith("test"), name))
    for name in order:
        is_test = name.split(".")[0] == "test"
        source = read_source(modules[name])
        if source is None or (is_test and is_held_out(name)):
            continue
        if (text := copies.strip(source)).strip():
            documents.append(Document(name, text, is_test, is_held_out(name)))
    return documents


def function_heads(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the head (signature and docstring) and the source of documented functions."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:  # what is left without copies need not parse
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        docstring_end, end = node.body[0].end_lineno, node.end_lineno
        if docstring_end is None or end is None or end - docstring_end < MIN_BODY_LINES:
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
        head = "\n".join(source.splitlines()[: docstring_end - node.lineno + 1])
        if len(head) <= MAX_HEAD_CHARS:
            yield head, source


def choose_prompts(held_out: Iterable[Document]) -> dict[str, list[str]]:
    """Return the contents of `prompts.json`: two heads of each document, and a function followed
    by the signature of a renamed copy."""
    functions: list[str] = []
    edits: list[str] = []
    for document in held_out:
        pairs = sorted(function_heads(document), key=lambda pair: len(pair[0]))
        functions += [head for head, _ in pairs[len(pairs) // 2 :][:2]]
        for source in [source for _, source in pairs if len(source) <= MAX_HEAD_CHARS][:1]:
            name = source.removeprefix("def ").split("(")[0]
            signature = source.split(":\n")[0].replace(f"def {name}", f"def {name}_copy", 1)
            edits.append(f"{source}\n\n\n{signature}:")
    return {"functions": functions, "edits": edits}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn 4,096 tokens: the end token has id 0, then come the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Streams(NamedTuple):
    """Packed documents of the library and of its tests, [tokens] int64 each, from which windows of
    `context_tokens` + 1 tokens are cut."""

    library: Tensor
    tests: Tensor
    context_tokens: int

    def draw(self, rows: int, seed: int, step: int, with_tests: bool = False) -> Tensor:
        """Return windows [rows, context + 1], which depend on seed and step alone."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        num_tests = int((torch.rand(rows, generator=generator) < TEST_SHARE).sum()) * with_tests
        parts = []
        for stream, count in ((self.library, rows - num_tests), (self.tests, num_tests)):
            if count:
                last = stream.numel() - self.context_tokens
                starts = torch.randint(0, last, (count, 1), generator=generator)
                parts.append(stream[starts + torch.arange(self.context_tokens + 1)])
        return torch.cat(parts)


def prepare(
    work: Path, root: Path | None, seed: int, context_tokens: int, tokenizer_of: Path | None = None
):
    """Return tokenizer, streams and documents, which are made once and kept under `work`. The
    tokenizer is the one in the file `tokenizer_of`, or is trained."""
    file, tokenizer_file = work / "corpus.pt", work / "tokenizer.json"
    if not file.exists():
        documents = load_corpus(root)
        training = [d for d in documents if not d.is_held_out]
        if tokenizer_of is None:
            tokenizer = train_tokenizer(d.text for d in training if not d.is_test)
        else:
            tokenizer = Tokenizer.from_file(str(tokenizer_of))
        tokenizer.save(str(tokenizer_file))
        random.Random(seed).shuffle(training)
        streams = [[0], [0]]
        for document in training:
            streams[document.is_test] += [*tokenizer.encode(document.text).ids, 0]
        saved = [list(map(tuple, documents)), *map(torch.tensor, streams)]
        torch.save(saved, file)
    documents, library, tests = torch.load(file)
    streams = Streams(
        library, tests if tests.numel() > context_tokens + 1 else library, context_tokens
    )
    return Tokenizer.from_file(str(tokenizer_file)), streams, [Document(*d) for d in documents]
