"""Settings for the whole suite: two threads, and hypothesis that gives the same verdict twice."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "2")
# Step costs measured beside other tests are not for the user's engines.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cbatch-tests-")
# Threads that wait by spinning make the suite several times slower where the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "cbatch",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("cbatch")
