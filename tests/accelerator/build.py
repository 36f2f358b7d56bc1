"""Build the test accelerator, as `make accelerator` does: `build.py FOLDER`.

FOLDER then holds everything a process needs on its PYTHONPATH. Nothing is compiled twice: a file's
object is kept under a hash of all sources, torch's version and the command.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "device").glob("*.cpp"))
HEADERS = sorted((HERE / "device").glob("*.h"))
TORCH = Path(torch.__file__).parent
COMPILE = [
    *("g++", "-c", "-O1", "-std=c++20", "-fPIC", "-Wall", "-Wno-unknown-pragmas"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=_sim_device"),
    *("-isystem", f"{TORCH}/include", "-isystem", f"{TORCH}/include/torch/csrc/api/include"),
    *("-isystem", sysconfig.get_paths()["include"]),
]
LINK = ["-shared", f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib"]
LIBRARIES = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
METADATA = "Metadata-Version: 2.1\nName: sim-device\nVersion: 0\n"
ENTRY_POINTS = "[torch.backends]\nsim = sim_device:autoload\n"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda source: compile_source(source, objects), SOURCES))
    for stale in set(objects.iterdir()) - set(compiled):
        stale.unlink()
    library = folder / "_sim_device.so"
    if not library.exists() or any(o.stat().st_mtime > library.stat().st_mtime for o in compiled):
        run("g++", *map(str, compiled), *LINK, *LIBRARIES, "-o", str(library))
    lay_out(folder)


def compile_source(source: Path, objects: Path) -> Path:
    key = hashlib.sha256(repr((COMPILE, torch.__version__)).encode())
    for path in (source, *HEADERS):
        key.update(path.read_bytes())
    made = objects / f"{source.stem}-{key.hexdigest()[:16]}.o"
    if not made.exists():
        run(*COMPILE, str(source), "-o", str(made.with_suffix(".part")))
        made.with_suffix(".part").rename(made)
    return made


def lay_out(folder: Path) -> None:
    """What Python finds there: the module, and an entry point that torch looks for."""
    shutil.copytree(HERE / "sim_device", folder / "sim_device", dirs_exist_ok=True)
    described = folder / "sim_device-0.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(METADATA)
    (described / "entry_points.txt").write_text(ENTRY_POINTS)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


if __name__ == "__main__":
    main()
