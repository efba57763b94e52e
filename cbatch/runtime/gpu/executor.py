"""The GPU executor: the same step plans, true positions on the device, nothing waits for the host."""

from __future__ import annotations

from cbatch.core.plan import StepPlan, StepResult
from cbatch.runtime.gpu.decoder import Decoder


class GpuExecutor:
    """Runs step plans on a model, by kernels. Both an `Executor` (`run`) and an
    `OverlappedExecutor` (`submit` and `wait`, one plan while one runs).

    `max_sequence_tokens` is the longest sequence, `step_budget_tokens` the most tokens of a step,
    `max_drafts` the most drafts of a row (0: nobody drafts). `block_size_tokens` is a power of two,
    at least 16. `reset()` after any exception: the state is then unspecified.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        num_blocks: int,
        block_size_tokens: int,
        max_slots: int,
        max_sequence_tokens: int,
        step_budget_tokens: int,
        draft: Decoder | None = None,
        max_drafts: int = 0,
    ) -> None:
        raise NotImplementedError

    def capture(self) -> None:
        """Capture the graphs of the usual step shapes; those beyond are captured when first met."""
        raise NotImplementedError

    def submit(self, plan: StepPlan) -> None:
        """Queue a step on the device."""
        raise NotImplementedError

    def wait(self) -> StepResult:
        """Result of the oldest step not waited for."""
        raise NotImplementedError

    def run(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.wait()

    def reset(self) -> None:
        """Forget every slot, and drop the results of steps under way."""
        raise NotImplementedError
