"""The executor for GPUs: step plans through Triton kernels and captured graphs.

Imports triton: only where `device` asks for it. Everything but the capture of graphs also runs on
CPU tensors under `TRITON_INTERPRET=1`, which is how it is tested.
"""

from cbatch.runtime.gpu.decoder import Decoder, load_decoder
from cbatch.runtime.gpu.executor import GpuExecutor

__all__ = ["Decoder", "GpuExecutor", "load_decoder"]
