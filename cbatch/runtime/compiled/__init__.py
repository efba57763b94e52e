"""Our own kernels for CPUs, in C: products, and a decoder's whole pass.

They exist because libraries are slow for few rows, above all of bf16 on CPUs without bf16
instructions, and because their bits change with the number of rows. A pass would also call hundreds
of small operations. The kernels keep weights in their stored type, packed in panels. A row's bits
do not depend on the other rows. A C compiler is needed (see `compiler`); without one, torch
computes.

- `library.c` and what it includes: the kernels, and the threads that share their loops (`team.h`);
  `build` compiles them, as one of `builds`.
- `product`: one product as the runtime calls it.
- `layer_attention`, `experts`: parts of a pass, for models whose other parts run in other code.
- `cbatch.runtime.cpu.compiled_pass` calls the pass.
"""

from cbatch.runtime.compiled.build import build_name, version
from cbatch.runtime.compiled.compiler import find_compiler
from cbatch.runtime.compiled.product import (
    MOST_LANES,
    Blocks,
    CompiledProduct,
    Run,
    compiles,
    compiles_blocks,
)

__all__ = [
    "MOST_LANES",
    "Blocks",
    "CompiledProduct",
    "Run",
    "build_name",
    "compiles",
    "compiles_blocks",
    "find_compiler",
    "version",
]
