"""Any file is either read or refused by name."""

from __future__ import annotations

import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.gguf_file import read_gguf
from tests.gguf_files import F32, Q8_0, Stored, gguf_bytes, stored

MATRIX = stored(torch.arange(64.0).view(2, 32))
needs_linux = pytest.mark.skipif(platform.system() != "Linux", reason="asks Linux for its memory")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    values = {"a.flag": True, "a.number": -3, "a.real": 0.5, "a.text": "grün", "a.none": ""}
    arrays = {"a.texts": ["x", "", "日本"], "a.numbers": [1, 2, 3], "a.reals": [0.25]}
    path = tmp_path / "x.gguf"
    for version, alignment in ((3, 32), (2, 64)):
        more = {"general.alignment": alignment}
        tensors = {"m": MATRIX, "v": stored(torch.ones(5)), "q": Stored(Q8_0, (3, 32), bytes(102))}
        path.write_bytes(gguf_bytes(values | arrays | more, tensors, version, alignment))
        file = read_gguf(path)
        read = {key: getattr(v, "tolist", lambda v=v: v)() for key, v in file.metadata.items()}
        assert read == values | arrays | more
        assert [t.shape for t in file.tensors.values()] == [(2, 32), (5,), (3, 32)]
        assert file.tensors["m"].raw.tobytes() == MATRIX.data
        assert torch.equal(
            file.tensors["m"].dequantised(torch.bfloat16),
            torch.arange(64.0).view(2, 32).bfloat16(),
        )
        assert file.tensors["q"].type.name == "Q8_0"
    path.write_bytes(head(keys=1) + key(b"a", 9, array(4, 0)))
    assert len(read_gguf(path).metadata["a"]) == 0


def head(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def entry(dims: tuple[int, ...], kind: int = F32, offset: int = 0, name: bytes = b"t") -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", kind, offset)


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


FULL = bytes(4096)
TEXT = struct.pack("<Q", 1) + b"x"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "magic: is not GGUF"),
        (head(magic=b"GGML"), "magic: is not GGUF"),
        (head(version=1), "version: 1 is not supported"),
        (head(version=3 << 24), r"version: 50331648 \(of a big-endian machine\) is not supported"),
        (head()[:12], "number of tensors: the file ends at byte 12, 16 are needed; the download"),
        (head(tensors=2**63) + FULL, "number of tensors: 9223372036854775808 are more than"),
        (head(keys=2**40) + FULL, "number of keys: 1099511627776 are more than"),
        (head(keys=400) + FULL, "number of keys: 400 are more than the file can hold"),
        (head(keys=1) + key(b"", 0, FULL), "key 1 of 1: its name has 0 bytes"),
        (head(keys=1) + struct.pack("<Q", 2**64 - 1) + FULL, "name has 18446744073709551615"),
        (head(keys=1) + key(b"a\xffb", 0, FULL), "key 1 of 1: its name b'a.*' is not printable"),
        (head(keys=2) + key(b"a", 0, b"1") * 2 + FULL, "a: appears twice"),
        (head(keys=1) + key(b"a", 13, FULL), "a: its type 13 is not known"),
        (head(keys=1) + key(b"a", 8, struct.pack("<Q", 2**62)) + FULL, "a: the file ends at byte"),
        (head(keys=1) + key(b"a", 8, struct.pack("<Q", 2) + b"\xc3\x28"), "a: string 0 is not UTF"),
        (head(keys=1) + key(b"a", 9, array(8, 2**60)) + FULL, "a: 1152921504606846976 strings"),
        (head(keys=1) + key(b"a", 9, array(4, 2**61)) + FULL, "a: the file ends at byte"),
        (head(keys=1) + key(b"a", 9, array(9, 1)) + FULL, "a: an array of type 9 is not supported"),
        (head(tensors=1) + entry(()) + FULL, "tensor t: has 0 dimensions"),
        (head(tensors=1) + entry((1,) * 5) + FULL, "tensor t: has 5 dimensions"),
        (head(tensors=1) + entry((32, 0)) + FULL, r"tensor t: shape \[0, 32\] does not fit"),
        (
            head(tensors=1) + entry((48, 2), Q8_0) + FULL,
            r"shape \[2, 48\] does not fit type Q8",
        ),
        (head(tensors=1) + entry((32,), 26) + FULL, "tensor t: type I32 is not supported; suppor"),
        (head(tensors=1) + entry((32,), 99) + FULL, "tensor t: type 99 is not supported; supporte"),
        (head(tensors=1) + entry((2**62, 2**62)) + FULL, "tensor t: the file ends at byte"),
        (head(tensors=1) + entry((32,), offset=2**63) + FULL, "tensor t: the file ends at byte"),
        (
            head(tensors=1) + entry((32,), offset=5) + FULL,
            "tensor t: offset 5 is not a multiple of",
        ),
        (head(tensors=2) + entry((32,)) * 2 + FULL, "tensor t: appears twice"),
        (
            head(tensors=2) + entry((32,)) + entry((32,), offset=96, name=b"u") + FULL,
            "tensor u: its data overlap those of t",
        ),
        (
            head(keys=1, tensors=1) + key(b"general.alignment", 8, TEXT) + entry((32,)) + FULL,
            "general.alignment: must be a power of 2 and at least 8, got 'x'",
        ),
        (
            head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 4)) + FULL,
            "general.alignment: must be a power of 2 and at least 8, got 4",
        ),
    ],
)
def test_lies_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"bad\.gguf: {words}|bad\.gguf: .*{words}"):
        read_gguf(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: cannot be read \(No such file"):
        open_checkpoint(tmp_path / "none.gguf")


def test_what_is_no_plain_file_is_named(tmp_path: Path) -> None:
    """Opening a pipe would wait for its writer."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match=r"pipe\.gguf: cannot be read \(not a regular file"):
        read_gguf(pipe)


def test_metadata_without_end_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    for kind, count, words in (
        (0, 2**26, "a: ends at byte 67108913"),
        (8, 2**23, "a: 8388608 s"),
    ):
        path.write_bytes(head(keys=1) + key(b"a", 9, array(kind, count)))
        os.truncate(path, 2**28)
        with pytest.raises(ModelError, match=words):
            read_gguf(path)
        path.unlink()


def fuzzed(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Load mutated models in a process of their own, since one may end it."""
    command = [sys.executable, "-m", "tests.runtime.model_fuzz", str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    at = folder / "at"
    mutation = at.read_text() if at.exists() else "before the first"
    assert done.returncode == 0, f"{mutation}\n{done.stderr[-5000:]}"
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@needs_linux
def test_mutated_models_are_served_or_refused(tmp_path: Path) -> None:
    summary = fuzzed(tmp_path, 0, 210)
    assert summary["served"] > 15 and summary["refused"] > 100 and summary["ways"] > 50


@needs_linux
@pytest.mark.fuzz
def test_ten_thousand_mutated_models(tmp_path: Path) -> None:
    summary = fuzzed(tmp_path, int(os.environ.get("CBATCH_FUZZ_SEED", "0")), 10_000)
    print(summary)
    assert summary["served"] > 1500 and summary["refused"] > 5000 and summary["ways"] > 1000
