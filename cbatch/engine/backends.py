"""Selection of the device, and of its backend: `cbatch/runtime/cpu` or `cbatch/runtime/gpu`."""

from __future__ import annotations

from cbatch.core.request.errors import FieldError
from cbatch.runtime.backend import Backend, Requirements


def backend_of(device: str) -> Backend:
    """Return the backend of a device such as "cuda:1". Raises `FieldError` for a name that is not
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
    """Return the device for `device` "auto": the first that supports the engine's options."""
    return next(kind for kind in ("cuda", "cpu") if backend_of(kind).may_auto_select(needs))
