"""Names of `drivetrain train`'s flags that other parts of Drivetrain must know, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drivetrain.core.hints import nearest

ALIASES = {
    "--num-gpus": "--nproc-per-node",
    "--gpus-per-node": "--nproc-per-node",
    "--num-nodes": "--nnodes",
    "--nodes": "--nnodes",
}
# Accelerate counts processes over all nodes, Drivetrain per node: only a hint, not an alias.
OF_OTHER_TOOLS = {
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "--np": "--nproc-per-node",
    "--nproc": "--nproc-per-node",
    "--gpus": "--nproc-per-node",
    "--num-processes": "--nproc-per-node",
    "--num-machines": "--nnodes",
}
# Flags that no script is likely to have for itself, so they may also follow the script's name.
AFTER_SCRIPT = {
    "--accept-change",
    "--run-dir",
    "--nproc-per-node",
    "--nnodes",
    "--standalone",
    "--max-restarts",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--grace-period",
    "--stall-timeout",
    "--slow-timeout",
    "--spares",
    "--max-preemptions",
    "--max-startup-failures",
}


def nearest_flag(said: str, known: Iterable[str]) -> str | None:
    """Return the flag that was probably meant, or None.

    Dashes are not compared, and a flag of one letter is similar to nothing: most would match.
    """
    if said in OF_OTHER_TOOLS:
        return OF_OTHER_TOOLS[said]
    by_name = {flag.lstrip("-"): flag for flag in known if len(flag.lstrip("-")) > 1}
    near = nearest(said.lstrip("-"), by_name)
    return by_name[near] if near else None


def values_of(argv: Sequence[str], flag: str) -> list[str]:
    """Return the values of a flag, written `--flag VALUE` or `--flag=VALUE`, in their order."""
    found = []
    for word, following in zip(argv, (*argv[1:], ""), strict=False):
        if word == flag:
            found.append(following)
        elif word.startswith(f"{flag}="):
            found.append(word.partition("=")[2])
    return found


def last_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag's last occurrence, which overrides the others."""
    return next(reversed(values_of(argv, flag)), None)
