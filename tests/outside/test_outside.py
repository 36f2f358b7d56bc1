"""A strategy, a target and a sink of another package: installed, and no line changed here."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PACKAGE = HERE / "package"
SCRIPT = str(HERE / "script.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an installer leaves behind: the package, and a .dist-info with its entry points."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE / "drivetrain_outside", site / "drivetrain_outside")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = site / "drivetrain_outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: drivetrain-outside\nVersion: 1.0\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = (str(site), str(REPOSITORY / "src"), str(REPOSITORY))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def drivetrain(environment: dict[str, str], *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "drivetrain", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_two_ranks_train_with_its_strategy_and_write_to_its_sink(
    installed: dict[str, str], tmp_path: Path
) -> None:
    losses = {}
    for strategy, num_ranks in (("ddp", 1), ("flat", 2)):
        where = tmp_path / strategy
        drivetrain(
            installed,
            *(
                "train",
                f"--nproc-per-node={num_ranks}",
                "--spares=0",
                f"--run-dir={tmp_path / 'run'}-{strategy}",
            ),
            *(SCRIPT, str(where), f"parallel.strategy={strategy}", "record.sinks=[csv]"),
        )
        losses[strategy] = [
            json.loads(Path(f"{where}.{rank}").read_text()) for rank in range(num_ranks)
        ]
    assert losses["flat"][0] == losses["flat"][1]
    assert losses["flat"][0] == pytest.approx(losses["ddp"][0], abs=1e-6)
    written = (tmp_path / "run-flat" / "scalars.csv").read_text().splitlines()
    steps = [line.split(",") for line in written if ",train/loss," in line]
    assert [int(step) for step, _, _ in steps] == list(range(1, 7))
    assert [float(value) for *_, value in steps] == pytest.approx(losses["flat"][0], abs=1e-6)
    assert written[-1] == "ended,finished,"


@pytest.mark.slow
def test_a_run_is_submitted_to_its_target(installed: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (SCRIPT, str(tmp_path / "losses"), "parallel.strategy=flat", "record.sinks=[]")
    asked = ("--nproc-per-node=1", "--spares=0", "--niceness=3", f"--run-dir={run}")
    shown = drivetrain(installed, "train", "--on", "background", *asked, "--dry-run", *words)
    assert "nice -n 3" in shown
    drivetrain(installed, "train", "--on", "background", *asked, *words)
    assert json.loads((run / "job.json").read_text())["target"]["name"] == "background"
    drivetrain(installed, "logs", str(run), "--follow")
    assert "finished" in drivetrain(installed, "jobs", str(run))
    assert json.loads((tmp_path / "losses.0").read_text())


@pytest.mark.slow
@pytest.mark.long
def test_the_planner_prices_its_strategy(installed: dict[str, str], tmp_path: Path) -> None:
    words = ("plan", "gpt2", "--cluster", "a100-80:2", "--strategies", "ddp,flat")
    path = tmp_path / "plan.json"
    drivetrain(installed, *words, "--global-batch-size", "8", "--output", str(path))
    plans = json.loads(path.read_text())["plans"]
    by_strategy = {plan["settings"]["parallel.strategy"]: plan for plan in reversed(plans)}
    assert set(by_strategy) == {"ddp", "flat"}


def test_its_keys_are_checked_like_any_other(installed: dict[str, str]) -> None:
    code = (
        "import sys; from drivetrain.config import resolve\n"
        "said = {'global_batch_size': 8, 'max_steps': 1}\n"
        "def tell(**parallel):\n"
        "    try: resolve({**said, 'parallel': parallel})\n"
        "    except Exception as error: print(error)\n"
        "tell(strategy='flatt'); tell(strategy='flat', flat={'wire_dtyp': 'bf16'})\n"
        "tell(strategy='flat', tp=2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], env=installed, text=True)
    assert said.splitlines() == [
        "parallel.strategy = flatt: must be 'ddp', 'fsdp', 'local_sgd', 'parameter_server', "
        "'deepspeed', 'horovod' or 'flat'; did you mean flat?",
        "parallel.flat.wire_dtyp = bf16: unknown key; did you mean parallel.flat.wire_dtype?",
        "parallel.tp = 2: cannot be combined with flat; use parallel.strategy=ddp or fsdp",
    ]


def test_what_cannot_be_loaded_is_named(installed: dict[str, str], tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.strategies]\nlost = nowhere.here:TRAITS\n")
    paths = os.pathsep.join((str(tmp_path), installed["PYTHONPATH"]))
    code = "import drivetrain.config"
    environment = {**installed, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "drivetrain.strategies = lost: cannot be loaded from nowhere.here:TRAITS" in done.stderr


def test_the_page_on_extending_shows_this_very_package() -> None:
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    for path in sorted((PACKAGE / "drivetrain_outside").glob("*.py")):
        assert path.read_text().strip() in page, path.name
    assert (PACKAGE / "pyproject.toml").read_text().strip() in page
