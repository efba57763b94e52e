"""The project's C kernels for CPUs: matrix products, and a decoder's whole forward pass.

They exist because libraries are slow for few rows, above all with bf16 weights on CPUs without bf16
instructions. A library's result for a row also depends on the number of rows, and a pass would call
hundreds of small operations. The kernels keep weights in their stored type, packed in panels. A
row's bits do not depend on the other rows. Compilation needs a C compiler (see `compiler`); without
one, torch computes.

- `library.c` and its headers: the kernels. `team.h` has the threads that share a kernel's loops.
  `build` compiles them for this CPU, `builds` lists the CPU features that a build may use.
- `product`: a single matrix product.
- `layer_attention`, `experts`: parts of a pass, for models whose other operations run in torch.
- `cbatch.runtime.cpu.compiled_pass` calls the whole pass.
"""

from cbatch.runtime.compiled.build import build_name, version
from cbatch.runtime.compiled.compiler import find_compiler
from cbatch.runtime.compiled.product import (
    MAX_LANES,
    Blocks,
    CompiledProduct,
    OutputRuns,
    compiles,
    compiles_blocks,
)

__all__ = [
    "MAX_LANES",
    "Blocks",
    "CompiledProduct",
    "OutputRuns",
    "build_name",
    "compiles",
    "compiles_blocks",
    "find_compiler",
    "version",
]
