"""Check every kernel that the executor launches, as this Triton compiles it, without a GPU.

    python -m tests.gpu_proofs.launches [--target sm_90] [--sizes first|usual|all] [--tritons DIR]

Executors of several sizes serve requests of every kind on a device without values. Faults are
specialisations that are met only after `capture`, that do not compile, or that spill. So are those
that take more registers or shared memory than there are. The program prints faults, and one JSON
line a target.

`--tritons`: check with the Tritons in the subfolders of DIR, too, each in a process of its own,
except one with the installed version. Without `--sizes` this Triton then compiles the usual sizes
for sm_90 and the first for other targets. The others compile the first for sm_90.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import triton

from tests.gpu_proofs.compiled import Verdict, verdicts
from tests.gpu_proofs.driver import Launches, Specialisation, recording
from tests.gpu_proofs.sizes import MORE, USUAL, Size
from tests.gpu_proofs.steps import KINDS, Run
from tests.triton_kernels.compile_check import TARGETS

SIZES = {"first": USUAL[:1], "usual": USUAL, "all": USUAL + MORE}


def launches_of(size: Size, target: str) -> tuple[Launches, Run]:
    """Make and capture an executor of this size, and serve every kind of request: each alone, then
    all together, then few."""
    with recording(TARGETS[target]) as launches:
        run = Run(size, target, launches)
        run.capture()
        for kinds in (*((kind,) for kind in KINDS), tuple(KINDS)):
            run.serve(*kinds)
        run.serve("greedy", count=4, steps=30)  # captured steps with prompts
    return launches, run


def late(launches: Launches) -> list[str]:
    """Return what would be compiled while requests wait, and in which phase."""
    met = ((phase, each) for phase, each in launches.specialisations.values())
    return [f"{each.name}: first met in {phase}" for phase, each in met if phase not in AHEAD]


AHEAD = ("made", "captured")


def prove(target: str, sizes: tuple[Size, ...]) -> bool:
    """Check a target and print the results; return True if there is no fault."""
    specialisations: dict[str, Specialisation] = {}
    count, graphs, faults, began = 0, 0, [], time.monotonic()
    for size in sizes:
        launches, run = launches_of(size, target)
        specialisations |= {key: each for key, (_, each) in launches.specialisations.items()}
        count += launches.count.total()
        graphs += len(run.device.captured)
        faults += [f"{size.name}: {fault}" for fault in late(launches)]
    built = verdicts(target, specialisations.values())
    faults += [f"{_short(verdict)}: {verdict.fault}" for verdict in built if verdict.fault]
    print(*faults, sep="\n", end="\n" if faults else "")
    codes = [verdict.code for verdict in built if verdict.code is not None]
    figures = {
        "triton": triton.__version__,
        "target": target,
        "sizes": len(sizes),
        "launches": count,
        "graphs": graphs,
        "specialisations": len(specialisations),
        "compiled": len(codes),
        "max_registers": max(code.registers for code in codes),
        "most_shared_bytes": max(code.shared_bytes for code in codes),
        "spilled": sum(code.spill_bytes > 0 for code in codes),
        "faults": len(faults),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(figures), flush=True)
    return not faults


def _short(verdict: Verdict) -> str:
    return verdict.key if len(verdict.key) < 400 else f"{verdict.key[:400]}..."


def prove_by_others(folder: Path, targets: list[str], sizes: str | None) -> bool:
    """Check with the Tritons in `folder`; return True if there is no fault."""
    passed, installed = True, triton.__version__
    others = (path for path in folder.iterdir() if path.is_dir() and path.name != installed)
    for path in sorted(others):
        for target in targets if sizes else ["sm_90"]:
            command = ["--target", target, "--sizes", sizes or "first"]
            done = subprocess.run(
                [sys.executable, "-m", "tests.gpu_proofs.launches", *command],
                env=os.environ | {"PYTHONPATH": f"{path.resolve()}{os.pathsep}{Path.cwd()}"},
            )
            passed = passed and not done.returncode
    return passed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_proofs.launches")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--sizes", choices=SIZES)
    parser.add_argument("--tritons", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    targets = options.target or list(TARGETS)
    passed = []
    for target in targets:
        few = options.tritons is not None and target != "sm_90"
        sizes = options.sizes or ("first" if few else "usual")
        passed.append(prove(target, SIZES[sizes]))
    if options.tritons is not None:
        passed.append(prove_by_others(options.tritons, targets, options.sizes))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
