"""The trained demo pair that ships with the project. `README.md` here is its model card."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["demo_head", "demo_paths", "demo_prompts", "edit_prompts"]

_FOLDER = Path(__file__).parent


def demo_paths() -> tuple[Path, Path]:
    """Return the folders of the target and of its draft, in Hugging Face layout."""
    return _FOLDER / "target", _FOLDER / "draft"


def demo_head() -> Path:
    """Return the folder of the target's EAGLE-3 head, which can draft instead of the draft
    model."""
    return _FOLDER / "head"


def demo_prompts() -> list[str]:
    """Return signatures with docstrings, of modules that the pair was not trained on."""
    return _prompts()["functions"]


def edit_prompts() -> list[str]:
    """Return prompts that suit lookups: a held-out function, and the start of a nearly equal
    function."""
    return _prompts()["edits"]


def _prompts() -> dict[str, list[str]]:
    return json.loads((_FOLDER / "prompts.json").read_text(encoding="utf-8"))
