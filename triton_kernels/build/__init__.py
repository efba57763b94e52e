"""Tools for building and testing kernels: compilation ahead of launches, argument checks, and a
patch of Triton's interpreter."""
