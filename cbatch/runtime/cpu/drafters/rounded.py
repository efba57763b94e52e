"""Products of draft heads on a CPU."""

from __future__ import annotations

from torch import Tensor

from cbatch.runtime.compiled import Blocks, CompiledProduct, OutputRuns
from cbatch.runtime.cpu.layers import CpuLayerBuilder
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.model.gguf_blocks import rounded_to_q8_0

_BLOCK = 32  # columns of a Q8_0 block


class RoundedProducts(CpuLayerBuilder):
    """Products of a head. If its target is `quantised`, weights are rounded to Q8_0, which halves
    the memory that a draft reads. Drafts are verified, so the head need not be exact."""

    quantised: bool  # see `HeadBuilder`

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        out, columns = weight.shape
        if not self.quantised or columns % _BLOCK:
            return super()._linear(weight, bias, in_scale)
        blocks = Blocks("Q8_0", columns, rounded_to_q8_0(weight))
        part = blocks, OutputRuns(out, out, 0)
        return Linear.of(CompiledProduct.of_blocks([part], bias, in_scale))
