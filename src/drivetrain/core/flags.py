"""The flags of `drivetrain train` that may also stand after the script."""

from __future__ import annotations

ALIASES = {
    "--num-gpus": "--nproc-per-node",
    "--gpus-per-node": "--nproc-per-node",
    "--num-nodes": "--nnodes",
    "--nodes": "--nnodes",
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
