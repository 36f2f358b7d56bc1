"""The flags of `drivetrain train` that may also come after the script."""

from __future__ import annotations

ALIASES = {
    "--num-gpus": "--nproc-per-node",
    "--gpus-per-node": "--nproc-per-node",
    "--num-nodes": "--nnodes",
    "--nodes": "--nnodes",
}
# Accelerate counts processes over all nodes, Drivetrain per node: only a hint, not an alias.
OF_OTHER_TOOLS = {
    "--num-processes": "--nproc-per-node",
    "--num-machines": "--nnodes",
}
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
}
