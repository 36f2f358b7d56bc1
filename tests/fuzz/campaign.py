"""So many inputs, half of them run directories: `python -m tests.fuzz.campaign 20000`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.inputs import SHOWN, documents, prepare, read_run, read_text_files, run_files


def campaign(root: Path, num_inputs: int) -> int:
    """Raises what it finds; otherwise how many inputs were tried."""
    prepare(root)
    tried = 0
    rules = settings(
        max_examples=-(-num_inputs // 2),
        deadline=None,  # the watch has its own
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    @rules
    @given(run_files(), st.sampled_from(sorted(SHOWN)))
    def runs(given_file: tuple[str, bytes], shown_by: str) -> None:
        nonlocal tried
        tried += 1
        read_run(root, *given_file, shown_by)

    @rules
    @given(documents())
    def files(data: bytes) -> None:
        nonlocal tried
        tried += 1
        read_text_files(root, data)

    runs()
    files()
    return tried


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"{campaign(Path(folder), int(sys.argv[1])):,} inputs, nothing found\n")
