"""Tools for kernels: compilation ahead of launches, features of devices, checks of arguments."""
