"""Half a run, a save, and the other half from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from drivetrain.testing import run_ranks
from drivetrain.verify.drills.drill import weights_fingerprint
from tests.gpu_smoke.checks.parity import FROM_ONE_DEVICE, STEPS, references
from tests.gpu_smoke.devices import backend, deterministic, fits, left_s, without_tf32
from tests.gpu_smoke.rows import Row, judged
from tests.ranks.matrix import FSDP, LAYOUTS, Parallel, hand_over, train
from tests.ranks.training import largest_deviation


def rows() -> Iterator[Row]:
    """The same layout: the same bits. Another: as close as it is to one device."""
    yield _same_bits("one device", 1, {})
    if not fits(2):
        return
    yield _same_bits("ddp, 2 devices", 2, LAYOUTS["ddp"][1])
    yield _same_bits("fsdp, 2 devices", 2, FSDP)
    chain = [(name, LAYOUTS[name][1]) for name in ("ddp", "fsdp", "tp")]
    with TemporaryDirectory(prefix="gpu-smoke-") as folder:
        found = run_ranks(handed_over, 2, left_s(), (folder, chain), backend())[0]
    for name, losses in found.items():
        deviation = largest_deviation(losses, references()["gpt"]["device"])
        figure = f"{deviation:.1e} from one device (allowed {FROM_ONE_DEVICE:.0e})"
        yield judged(f"{name}, 2 devices", deviation <= FROM_ONE_DEVICE, figure)


def _same_bits(name: str, world_size: int, parallel: Parallel) -> Row:
    with TemporaryDirectory(prefix="gpu-smoke-") as folder:
        runs = run_ranks(whole_and_halves, world_size, left_s(), (folder, parallel), backend())[0]
        whole, resumed = (weights_fingerprint(Path(run)) for run in runs)
    figure = f"SHA-256 {whole[:16]} uninterrupted, {resumed[:16]} resumed"
    return judged(name, whole == resumed, figure)


def whole_and_halves(folder: str, parallel: Parallel) -> tuple[str, str]:
    """The directories of a run, and of one that was resumed from a save of the same layout."""
    deterministic()
    _, whole = train("gpt", folder, parallel, STEPS)
    _, half = train("gpt", folder, parallel, STEPS // 2, every_steps=STEPS // 2)
    _, resumed = train("gpt", folder, parallel, STEPS, resume_from=half)
    return whole, resumed


def handed_over(folder: str, chain: list[tuple[str, Parallel]]) -> dict[str, list[float]]:
    without_tf32()
    return hand_over(folder, "gpt", chain, STEPS)
