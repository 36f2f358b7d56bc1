"""Whether a script uses Drivetrain, judged by its source: nothing of it is run."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from drivetrain.supervise.script import imports_drivetrain

PROJECT = {
    "direct.py": "import torch\nfrom drivetrain import Trainer\n",
    "inside.py": "def main():\n    import drivetrain\n",
    "beside.py": "from tools.training import fit\n",  # tools has no __init__.py
    "tools/training.py": "import drivetrain.train.trainer\n",
    "through.py": "import json, pkg\n",
    "pkg/__init__.py": "from . import inner\n",
    "pkg/inner.py": "from .deep.end import model\n",
    "pkg/deep/end.py": "from ..last import model\n",
    "pkg/last.py": "from drivetrain import Task\n",
    "pkg/__main__.py": "print('hello')\n",
    "plain.py": "import torch\nimport plain, drivetrain_tools\nfrom . import drivetrain\n",
    "broken.py": "from drivetrain import (\n",
    "too_deep.py": "from ..................... import drivetrain\n",
    "start.sh": "#!/bin/sh\npython direct.py\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\1\2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["direct", "inside", "beside", "through"])
def test_an_import_counts_wherever_it_is_in_the_project(project: Path, name: str) -> None:
    assert imports_drivetrain([f"{name}.py", "max_steps=3"])
    assert imports_drivetrain([str(project / f"{name}.py")])
    assert imports_drivetrain(["-m", name])


@pytest.mark.parametrize(
    "name", ["plain.py", "broken.py", "too_deep.py", "start.sh", "binary", "not_there.py"]
)
def test_what_does_not_import_it_or_is_not_python_does_not_use_it(project: Path, name: str) -> None:
    assert not imports_drivetrain([name])
    assert not imports_drivetrain([str(project / name)])


def test_a_module_is_found_as_python_finds_it(project: Path) -> None:
    assert imports_drivetrain(["-m", "pkg"]), "the package is imported before its __main__"
    assert imports_drivetrain(["-m", "tools.training"])
    assert imports_drivetrain(["-m", "drivetrain.verify.drills.workload"])
    assert not imports_drivetrain(["-m", "plain"])
    assert not imports_drivetrain(["-m", "json.tool"])
    assert not imports_drivetrain(["-m", "not.there"])
    (project / "drivetrain.py").write_text("")
    assert imports_drivetrain(["direct.py"])


def test_the_package_of_a_module_may_be_installed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = project / "site-packages"
    for name, text in {
        "mine/__init__.py": "",
        "mine/train.py": "import other\nfrom mine.engine import run\n",
        "mine/engine.py": "import drivetrain\n",
        "mine/tools.py": "import other\n",
        "other/__init__.py": "import drivetrain\n",
    }.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text)
    monkeypatch.syspath_prepend(installed)
    assert imports_drivetrain(["-m", "mine.train"])
    assert not imports_drivetrain(["-m", "mine.tools"]), "other libraries are not followed"


def test_an_editable_install_is_followed_where_only_its_import_hook_finds_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project / "code"  # the package is called otherwise than its folder
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it was executed')\n")
    (folder / "engine.py").write_text("import drivetrain\n")
    (folder / "tools.py").write_text("import torch\n")

    class Hook:
        @staticmethod
        def find_spec(name: str, *_: object) -> ModuleSpec | None:
            if name == "broken":
                raise RuntimeError("a hook with a bug")
            if name != "editable":
                return None
            return spec_from_file_location(name, folder / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    for name in ("engine", "tools"):
        (project / f"uses_{name}.py").write_text(f"import broken\nfrom editable import {name}\n")
    assert imports_drivetrain(["uses_engine.py"])
    assert not imports_drivetrain(["uses_tools.py"])
    assert imports_drivetrain(["-m", "editable.engine"])
    assert not imports_drivetrain(["-m", "editable.tools"])


def test_a_source_that_cannot_be_parsed_is_not_known_to_use_it(project: Path) -> None:
    (project / "deep.py").write_text("import drivetrain\nx = " + "-" * 100_000 + "1\n")
    assert not imports_drivetrain(["deep.py"])
