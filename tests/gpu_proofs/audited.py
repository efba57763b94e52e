"""A plugin of pytest that audits every launch of the given tests.

    TRITON_INTERPRET=1 python -m pytest -p tests.gpu_proofs.interpreted.audited \
        tests/triton_kernels/interpreter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.gpu_proofs.interpreted.audit import Audit
from tests.gpu_proofs.interpreted.light import without_overflow_checks

_seen: Counter[str] = Counter()
_kernels: set[str] = set()


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    """Audit a test. The audit ends after all patches of the test are undone."""
    audit = Audit()
    with pytest.MonkeyPatch.context() as patch, audit.auditing():
        without_overflow_checks(patch)  # tests make these checks when they are not audited
        yield
    _kernels.update(audit.launches)
    _seen.update(
        launches=audit.launches.total(),
        programs=audit.programs,
        loads=audit.loads,
        stores=audit.stores,
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in _seen.items())
    terminalreporter.write_line(f"audited: {len(_kernels)} kernels, {counts}; orders: 3")
