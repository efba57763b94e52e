"""Tools for building and testing kernels: cases of the compile check, argument checks, and repairs
of Triton's interpreter."""
