"""Processes for tasks of unpredictable time and memory. The system enforces their limits."""

from cbatch.workers.pool import NoWorkerError, PoolClosedError, WorkerDiedError, WorkerPool
from cbatch.workers.worker import TaskLimits

__all__ = ["NoWorkerError", "PoolClosedError", "TaskLimits", "WorkerDiedError", "WorkerPool"]
