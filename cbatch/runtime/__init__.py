"""Models, paged KV and the torch executor: the part of cbatch that uses torch."""

import os

# Huge pages for large tensors, where the system grants them (PyTorch >= 2.2, Linux): decoding reads
# all weights once a step, and small pages slow this down by address translation. torch reads the
# variable at its first allocation. A value that is already set is kept.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
