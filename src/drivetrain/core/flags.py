"""The flags of `drivetrain train` that may also stand after the script."""

from __future__ import annotations

ALIASES = {
    "--num-gpus": "--nproc-per-node",
    "--gpus-per-node": "--nproc-per-node",
    "--num-nodes": "--nnodes",
    "--nodes": "--nnodes",
}
# Accelerate's count is of all nodes, ours of each: named in a hint, and not taken as the same.
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
