"""Lines that only CUDA and NCCL can reach: counted, and written into docs/gpu.md.

    python -m tests.cuda_only docs/gpu.md

A place is a function, a class, or one statement by how its line begins. Statements are counted as
coverage tools count them: no definitions, no docstrings.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import drivetrain

SOURCE = Path(drivetrain.__file__).parent
TELLTALE = re.compile("cuda|nccl|nvml|cublas|cudnn|nvidia", re.IGNORECASE)
SKIPPED = ("bench", "doctor")
"""Benchmarks and the doctor are not part of a run."""
BLOCK = re.compile(r"(<!-- only CUDA -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    file: str
    names: tuple[str, ...]
    what: str
    seen: str


_KERNELS = "called with the arguments of torch's schema, and no kernel behind it"
_NEVER = "never"
PLACES = (
    Place(
        "parallel/attention.py",
        ("_Flash", "_Efficient", "_filled_up"),
        "attention over gathered keys and values by flash and memory-efficient kernels "
        "(flash: XPU too)",
        _KERNELS,
    ),
    Place(
        "record/system.py",
        (
            *("self._nvml = nvml", "count = range(nvml", "self._handles = ["),
            *("Gpus.look", "Gpus._questions"),
        ),
        "use, memory, power and temperature of GPUs, by NVML",
        _NEVER,
    ),
    Place(
        "train/numerics/bitwise_mode.py",
        ("settle_workspace(has_begun",),
        "cuBLAS's workspace, set before CUDA begins",
        "the function by tests, its call never",
    ),
    Place(
        "train/live/replicas.py",
        ('group = "ProcessGroupGloo" if',),
        "live membership over torchft's NCCL group",
        _NEVER,
    ),
    Place(
        "compat/ray.py",
        ("torch_config=TorchConfig(backend=",),
        "Ray's workers on GPUs meet over NCCL",
        _NEVER,
    ),
    Place(
        "launch/targets/ray/driver.py",
        ('backend=_literal("cpu:gloo,cuda:nccl"',),
        "the same in a submitted Ray job",
        "the text of the script by tests",
    ),
)

RUN_EVERYWHERE = {
    "cli/profile.py": "prints a command for Nsight Systems",
    "cluster/catalogue.py": "names of products",
    "diagnose/trace.py": "names in a profile, gloo's beside NCCL's",
    "strategies/ddp/__init__.py": "names of other launchers' backends",
    "launch/early.py": "files of drivers: whether they exist, and variables, on every machine",
    "launch/targets/kubernetes/options.py": "the name of a resource, also in an error",
    "launch/targets/slurm.py": "an example in a help text",
    "parallel/blocks.py": "names of operators, the CPU's beside CUDA's",
    "supervise/failures/failure.py": "words in other libraries' errors",
    "supervise/failures/dump_responder.py": "both of torch's recorders by the same lines; NCCL's "
    "entries follow torch's source and have not been seen",
    "supervise/starting.py": "a variable that is set on every machine",
    "supervise/processes/forking.py": "asks every module that torch has",
    "supervise/processes/head_start.py": "a variable that is set on every machine",
    "cli/commands/benching.py": "help that names backends",
    "compat/settings.py": "what is refused without CUDA",
    "parallel/accelerator.py": "the variables that show a process some devices only",
    "train/numerics/tf32.py": "torch's flags, which a build for CPUs has too",
}
"""Files that name CUDA, and whose lines run without it."""


def files_that_name_cuda() -> set[str]:
    """Those with a name or a text in code, comments and docstrings aside."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(SKIPPED) and _names_cuda(path.read_text()):
            found.add(name)
    return found


def _names_cuda(code: str) -> bool:
    docstrings = {
        node.value.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return any(
        token.type in (tokenize.NAME, tokenize.STRING) and TELLTALE.search(token.string)
        for token in tokenize.generate_tokens(StringIO(code).readline)
        if token.start[0] not in docstrings
    )


def count(place: Place) -> int:
    """Its statements; a name that is no longer there raises."""
    code = (SOURCE / place.file).read_text()
    return sum(_count(code, name) for name in place.names)


def _count(code: str, name: str) -> int:
    if not name.replace(".", "").isidentifier():
        lines = [line for line in code.splitlines() if line.strip().startswith(name)]
        if len(lines) != 1:
            raise LookupError(f"{len(lines)} lines begin with {name!r}")
        return 1
    scope: ast.AST = ast.parse(code)
    for part in name.split("."):
        inside = {getattr(node, "name", ""): node for node in ast.iter_child_nodes(scope)}
        scope = inside[part]
    return sum(_is_counted(node) for node in ast.walk(scope))


def _is_counted(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
    return isinstance(node, ast.stmt) and not is_text and not defines


def table() -> str:
    lines = ["| where | statements | what | run so far |", "| --- | ---: | --- | --- |"]
    for place in PLACES:
        lines.append(f"| `{place.file}` | {count(place)} | {place.what} | {place.seen} |")
    lines.append(f"| all | {total()} | | |")
    return "\n".join(lines) + "\n"


def total() -> int:
    return sum(count(place) for place in PLACES)


def refreshed(page: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}\n{table()}\n{match[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(refreshed(path.read_text()))
