"""The wing of GPUs: steps run with Triton kernels and captured CUDA graphs.

Modules here import triton, except `backend`. All of them except graph capture also run on CPU
tensors under `TRITON_INTERPRET=1`; the tests use that.
"""
