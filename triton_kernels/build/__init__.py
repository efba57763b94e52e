"""What building and testing kernels needs: cases of the compile check, checks of arguments, and the
interpreter's repair."""
