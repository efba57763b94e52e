"""Processes for tasks of unpredictable time and memory. The system enforces their limits."""

from cbatch.workers.pool import PoolClosedError, WorkerDiedError, WorkerPool
from cbatch.workers.worker import TaskLimits

__all__ = ["TaskLimits", "WorkerDiedError", "WorkerPool", "PoolClosedError"]
