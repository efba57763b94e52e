"""Tasks that may take all time or memory, run in processes that the system ends."""

from cbatch.workers.pool import PoolClosedError, WorkerDiedError, WorkerPool
from cbatch.workers.worker import TaskLimits

__all__ = ["TaskLimits", "WorkerDiedError", "WorkerPool", "PoolClosedError"]
