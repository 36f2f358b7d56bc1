"""What is mutated, and which tests are there to notice."""

from __future__ import annotations

from pathlib import Path

MUTATED = (
    "src/drivetrain/checkpoint/*.py",
    "src/drivetrain/data/*.py",
    *(
        f"src/drivetrain/supervise/{name}.py"
        for name in ("machine", "policy", "settings", "stall", "idle", "requests", "attempt")
    ),
    "src/drivetrain/supervise/ending/classify.py",
    "src/drivetrain/supervise/ending/failure.py",
    "src/drivetrain/supervise/ending/report.py",
    "src/drivetrain/supervise/meeting/rules.py",
    "src/drivetrain/config/rules.py",
    "src/drivetrain/config/keys.py",
    "src/drivetrain/config/provenance.py",
)
# Where mutants are planted by hand besides.
PLANTED_IN = ("src/drivetrain/train/watch/meter.py", "src/drivetrain/train/saving/timetable.py")
# Of these, the tests that are neither slow nor long. Most need no other process.
TESTS = (
    *(
        f"tests/unit/test_{name}.py"
        for name in (
            *("batches", "checkpoint", "classify", "config", "decision_matrix", "group", "idle"),
            *("on_disk", "refused", "rendezvous", "requests", "supervise", "timetable", "step"),
        )
    ),
    "tests/resume/test_contract.py",
    "tests/security/test_hostile_checkpoints.py",
    "tests/security/test_no_pickle.py",
    "tests/security/test_names.py",
    "tests/security/test_addresses.py",
    "tests/ranks/test_damaged.py",
    "tests/ranks/test_full_disk.py",
)


def mutated_files(root: Path) -> list[str]:
    """Relative to the project, in order."""
    return [
        str(path.relative_to(root))
        for pattern in MUTATED
        for path in sorted(root.glob(pattern))
        if path.name != "__init__.py"
    ]
