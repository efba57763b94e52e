"""Models, paged KV and the torch executor: the half of cbatch that knows torch."""

import os

# Huge pages for large tensors, where the system grants them (PyTorch >= 2.2, Linux): decoding reads
# all weights once a step, and with small pages address translation is part of the price. Read at
# torch's first allocation; a value that is already set wins.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
