"""Tools for building and testing kernels: compilation ahead, argument checks, and a patch of Triton's
interpreter."""
