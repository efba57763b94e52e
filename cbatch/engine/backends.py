"""Choice of the device, and so of the wing of `cbatch/runtime` that computes."""

from __future__ import annotations

from cbatch.core.request.errors import FieldError
from cbatch.runtime.backend import Backend, Requirements


def backend_of(device: str) -> Backend:
    """Return the backend of a device, "cuda:1" say. Raises `FieldError` for a name that is not
    supported."""
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not number.isdecimal()):
        raise FieldError("device", f"{device!r} is not supported", "use auto, cpu, cuda or cuda:1")
    if kind == "cuda":
        from cbatch.runtime.gpu.backend import GpuBackend

        return GpuBackend()
    from cbatch.runtime.cpu.backend import CpuBackend

    return CpuBackend()


def default_device(needs: Requirements) -> str:
    """Return the device of `device` "auto": the first that supports the options of the engine."""
    return next(kind for kind in ("cuda", "cpu") if backend_of(kind).suits(needs))
