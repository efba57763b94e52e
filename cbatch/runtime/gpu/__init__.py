"""GPU execution: steps run with Triton kernels and captured CUDA graphs.

Modules here import triton, except `backend` and `support`. Everything except graph capture also
runs on CPU tensors under `TRITON_INTERPRET=1`, as in the tests.
"""
