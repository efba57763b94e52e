"""Our own kernels for CPUs, in C: products, and a decoder's whole pass.

Libraries leave gaps there: few rows, above all of bf16 on CPUs without bf16 instructions; bits that
change with the number of rows; and hundreds of small operations a pass, each of which has to be
called. The kernels keep weights in the type they come in, packed in panels, have the same bits for
a row whatever rows are beside it, and need a C compiler (see `compiler`); where there is none,
everything goes without them.

- `library.c` and what it includes: the kernels, and the threads that share their loops (`team.h`);
  `build` compiles them, as one of `builds`.
- `product`: one product as the runtime calls it.
- `layer_attention`, `experts`: parts of a pass, for models whose other parts are not ours.
- `cbatch.runtime.cpu.compiled_pass` calls the pass.
"""

from cbatch.runtime.cpu.compiled.build import build_name, version
from cbatch.runtime.cpu.compiled.compiler import find_compiler
from cbatch.runtime.cpu.compiled.product import (
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
