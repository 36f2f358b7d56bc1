"""What is mutated, and which tests are there to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """Files that the same tests are for. Of the tests, those that are neither slow nor long."""

    mutated: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of pytest."""
    planted_in: tuple[str, ...] = ()
    """Where mutants are planted by hand besides."""

    def files(self, root: Path) -> list[str]:
        """Relative to the project, in order."""
        return [
            str(path.relative_to(root))
            for pattern in self.mutated
            for path in sorted(root.glob(pattern))
            if path.name != "__init__.py"
        ]


GROUPS = {
    # None of it loads torch: without the conftest, which does, a mutant takes moments.
    "decisions": Group(
        mutated=(
            *(
                f"src/drivetrain/supervise/{name}.py"
                for name in ("machine", "policy", "settings", "stall", "requests")
            ),
            "src/drivetrain/supervise/failures/failure.py",
            "src/drivetrain/config/rules.py",
            "src/drivetrain/config/keys.py",
            "src/drivetrain/config/provenance.py",
        ),
        tests=tuple(
            f"tests/unit/test_{name}.py"
            for name in ("supervise", "classify", "idle", "requests", "config")
        ),
        # and one test that goes by the clock, which a busy machine would fail for any mutant
        options=(
            "--noconftest",
            "--deselect=tests/unit/test_config.py::test_however_large_a_batch_is_the_answer_comes_at_once",
        ),
    ),
    "state": Group(
        mutated=(
            "src/drivetrain/checkpoint/*.py",
            "src/drivetrain/data/*.py",
            "src/drivetrain/supervise/attempt.py",
            "src/drivetrain/supervise/failures/reporting.py",
        ),
        tests=(
            *(
                f"tests/unit/test_{name}.py"
                for name in (
                    *("checkpoint", "on_disk", "timetable", "batches", "refused", "train"),
                    *(
                        "skipped_steps",
                        "misused_task",
                        "step",
                        "group",
                        "digest",
                        "blame",
                        "sharing",
                    ),
                    *("stopping", "trained_only", "export_memory", "pretrained", "whose_run"),
                    *("small_parts", "stream_parts", "parts_of_state"),
                    *("attempt_parts", "staging"),
                )
            ),
            "tests/checkpoint",
            "tests/data",
            "tests/resume",
            "tests/security/test_hostile_checkpoints.py",
            "tests/security/test_no_pickle.py",
            "tests/security/test_addresses.py",
            *(
                f"tests/ranks/test_{name}.py"
                for name in (
                    *("checkpoint_verbs", "damaged", "full_disk", "other_model", "resume", "live"),
                    *("streams", "stream_ranks", "stream_resume", "samplers", "evaluation"),
                    *("keep_loop", "ending", "trained_only", "ema"),
                    "final_weights",
                )
            ),
            "tests/launch/test_failure.py",
            "tests/tune/test_fork.py",
        ),
        planted_in=(
            "src/drivetrain/train/watch/meter.py",
            "src/drivetrain/train/saving/timetable.py",
        ),
    ),
}
