"""Loading of a draft head for a target that is loaded already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cbatch.core.request.errors import FieldError, InputError
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.drafting.heads.trial import take_head
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.head_config import is_head, mtp_head, read_head
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.mtp_weights import MtpWeights

H = TypeVar("H", bound=Head)
_logger = logging.getLogger("cbatch")


def load_head(
    request: Any, target: Any, trial: Any, classes: Mapping[str, Callable[..., H]]
) -> H | None:
    """Return the head of a `LoadRequest`, after its trial; `trial` has the passes of the target.
    None if a head that no option names is of no use, which is logged."""
    assert request.draft is not None
    try:
        heads = load_heads(Path(request.draft), target, request.model, classes)
        return take_head(request.draft, heads, trial, request.trial_texts)
    except InputError as error:
        if not request.head_is_optional:
            raise
        _logger.warning("%s; it is left out", error)
        return None


def load_heads(
    path: Path, target: Any, target_path: str | Path, classes: Mapping[str, Callable[..., H]]
) -> list[H]:
    """Return the head in a directory, once for each way to read its files, the likeliest first; or
    the MTP head in the target's own file or directory. `classes`: the head classes of the target's
    device, by kind. Raises ModelError naming file and field or tensor."""
    own = not is_head(path)
    if own and "mtp" not in classes:
        raise FieldError("drafter", "MTP heads are not supported on a GPU", "use ngram or suffix")
    rows = getattr(target.head, "weight", None)  # the output matrix on a GPU, unless quantised
    if own or rows is None:
        checkpoint = open_checkpoint(target_path)
        rows = checkpoint.head()
    weights = MtpWeights(path, checkpoint) if own else HeadWeights.of(path)
    readings = [mtp_head(target.config)] if own else read_head(path, target.config)
    return [classes[each.kind](each, weights, target, rows) for each in readings]
