"""The trained pair that ships with the project; `README.md` in this
folder is its model card."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["demo_head", "demo_paths", "demo_prompts", "edit_prompts"]

_FOLDER = Path(__file__).parent


def demo_paths() -> tuple[Path, Path]:
    """Folders of the target and of its draft, in Hugging Face layout."""
    return _FOLDER / "target", _FOLDER / "draft"


def demo_head() -> Path:
    """Folder of the target's EAGLE-3 head, which drafts for it in the draft's place."""
    return _FOLDER / "head"


def demo_prompts() -> list[str]:
    """Function heads (signature and docstring) of modules the pair was not trained on."""
    return _prompts()["functions"]


def edit_prompts() -> list[str]:
    """A held-out function, then the start of a nearly equal one: text that repeats itself."""
    return _prompts()["edits"]


def _prompts() -> dict[str, list[str]]:
    return json.loads((_FOLDER / "prompts.json").read_text(encoding="utf-8"))
