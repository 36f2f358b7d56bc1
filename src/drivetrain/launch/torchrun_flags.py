"""torchrun's flags, for desks: to ask torch itself would take seconds.

A test holds this list against torchrun's own parser; nodes, which load torch anyway, ask that.
"""

from __future__ import annotations

import argparse

SWITCHES = ("--standalone", "--module", "-m", "--no-python", "--run-path", "--virtual-local-rank")
WITH_VALUE = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--redirects",
    "-r",
    "--tee",
    "-t",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
)


def add_torchruns_flags(parser: argparse.ArgumentParser) -> None:
    """Their names, and which take a value."""
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in WITH_VALUE:
        parser.add_argument(flag)
