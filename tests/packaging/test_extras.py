"""Extras resolve at once, also with an old pip and without constraints.txt, which only we have.

Needs a package index. pip says that it is "still looking at multiple versions" when it tries a
library's eighth version because of another's bounds: from there it is minutes, or an ancient
release that no longer builds.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Each alone; the two whose libraries have bounds that exclude each other; and all that CI has.
ASKED = [*(name for name in EXTRAS if name != "dev-all"), "kubernetes,s3", "mlflow,s3", "dev-all"]


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pip that comes with this Python, however old, where nothing is installed."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "pip")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", ASKED)
def test_an_extra_resolves_without_trying_release_after_release(pip: str, extra: str) -> None:
    torch = f"torch=={version('torch')}"  # of the newest, old pips must fetch gigabytes to read it
    words = [pip, "install", "--dry-run", "--no-input", torch, f"{ROOT}[{extra}]"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tries = [line for line in done.stdout.splitlines() if "still looking at multiple" in line]
    assert tries == []


def test_extras_are_asked_for_by_code_or_a_page() -> None:
    """One that nothing names any more goes."""
    ours = {"dev", "dev-all", "docs", "release", "test"}
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("src/**/*.py")]
    text = "\n".join(page.read_text() for page in pages)
    forms = ('extra="{}"', 'install_command("{}")', "[{}]")
    unused = [
        name
        for name in EXTRAS.keys() - ours
        if not any(form.format(name) in text for form in forms)
    ]
    assert unused == []


def test_dev_is_without_the_heaviest() -> None:
    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for line in EXTRAS[extra]:
            name, _, rest = line.partition("[")
            if name == "drivetrain":
                found = found.union(*(brought(each) for each in rest.rstrip("]").split(",")))
            else:
                found.add(line.split(">")[0].split("<")[0])
        return found

    heavy = {"mlflow", "wandb", "deepspeed", "transformers"}
    assert heavy.isdisjoint(brought("dev"))
    assert heavy <= brought("dev-all")


def test_the_lock_has_everything_that_ci_installs_and_no_addresses() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert all("==" in line and "://" not in line and " @ " not in line for line in lines)
    locked = {line.split("==")[0] for line in lines}
    assert {"mlflow", "kubernetes", "pytest-xdist", "ray", "py-spy"} <= locked
    assert not {name for name in locked if name in ("torch", "triton")}
