"""Logits by llama-cpp-python, run by an interpreter that has it: python llama_cpp_logits.py FOLDER.

FOLDER holds rows of tokens, `row*.npy`, and files, `*.gguf`; `NAME.gguf.npy` gets the logits of all
rows, each computed alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]

folder = Path(sys.argv[1])
rows = [np.load(path) for path in sorted(folder.glob("row*.npy"))]
for path in folder.glob("*.gguf"):
    model = Llama(
        str(path), n_ctx=64, logits_all=True, type_k=0, type_v=0, swa_full=True, verbose=False
    )
    logits = []
    for row in rows:
        model.reset()
        model.eval(row.tolist())
        logits.append(np.array(model.scores[: len(row)]))
    np.save(f"{path}.npy", np.concatenate(logits))
