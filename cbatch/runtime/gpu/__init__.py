"""The executor for GPUs: it runs step plans with Triton kernels and captured CUDA graphs.

Importing this package imports triton, so the engine does so only for a GPU. All of it except graph
capture also runs on CPU tensors under `TRITON_INTERPRET=1`; the tests use that.
"""

from cbatch.runtime.gpu.decoder import Decoder, load_decoder
from cbatch.runtime.gpu.executor import GpuExecutor

__all__ = ["Decoder", "GpuExecutor", "load_decoder"]
