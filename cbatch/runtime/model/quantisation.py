"""The quantisation of a checkpoint, from its config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

_FORMATS = ("pack-quantized", "float-quantized", "naive-quantized")


class Quantisation(NamedTuple):
    method: str  # "compressed-tensors", "gptq", "awq", "fp8" or "mxfp4"
    zero_shift: int  # added to stored zero points
    block_rows: int | None  # fp8: rows and columns that share a scale
    block_columns: int | None


def parse_quantisation(given: Any, error: Callable[[str, str], Exception]) -> Quantisation | None:
    """Parse `quantization_config` of a config.json. Raises `error(field, problem)`."""

    def refused(name: str, problem: str) -> Exception:
        return error(f"quantization_config.{name}", problem)

    if given is None:
        return None
    if not isinstance(given, dict):
        raise error("quantization_config", f"must be an object, got {given!r:.80}")
    method = given.get("quant_method")
    rows = columns = None
    if method == "compressed-tensors":
        if given.get("format") not in _FORMATS:
            known = f"supported: {', '.join(_FORMATS)}"
            raise refused("format", f"{given.get('format')!r:.40} is not supported; {known}")
        if given.get("transform_config"):
            raise refused("transform_config", "rotations are not supported")
    elif method == "gptq":
        if given.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            stated = given["checkpoint_format"]
            raise refused("checkpoint_format", f"{stated!r:.40}; supported: gptq, gptq_v2")
    elif method == "awq":
        if str(given.get("version", "gemm")).lower() != "gemm":
            raise refused("version", f"{given['version']!r:.40}; supported: gemm")
    elif method == "fp8":
        size = given.get("weight_block_size")
        if size is not None:
            numbers = isinstance(size, list) and all(isinstance(n, int) and n > 0 for n in size)
            if not numbers or len(size) != 2:
                raise refused("weight_block_size", f"must be two numbers, got {size!r:.40}")
            rows, columns = size
    elif method != "mxfp4":
        known = "compressed-tensors, gptq, awq, fp8, mxfp4; or use the unquantised weights"
        raise refused("quant_method", f"{method!r:.40} is not supported; supported: {known}")
    shifted = method == "gptq" and given.get("checkpoint_format", "gptq") == "gptq"
    return Quantisation(method, int(shifted), rows, columns)
