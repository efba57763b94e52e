"""Constants of the noise that `cbatch/core/request/noise.py` specifies."""

from __future__ import annotations

import struct
from typing import Final

# Streams; the same numbers as `cbatch.core.request.noise.Purpose`.
DRAFT: Final = 0
ACCEPT: Final = 1
RESIDUAL: Final = 2
BONUS: Final = 3
COUPLED: Final = 4

PHILOX_ROUNDS = 10
THREE_QUARTERS_BITS = 0x3F400000
SMALL_DRAW = 1 << 30
LOG1P_COEFFICIENT_BITS = (
    0x3F800000, 0xBF000000, 0x3EAAAAE3, 0xBE800019, 0x3E4CB0A4,
    0xBE2A73FB, 0x3E146A90, 0xBE070E71, 0x3DD5E1C4, 0xBD36AE97,
)  # fmt: skip
# ln 2 and the coefficients, as Python floats that are exact in fp32.
LN2, *COEFFICIENTS = struct.unpack("11f", struct.pack("11I", 0x3F317218, *LOG1P_COEFFICIENT_BITS))
