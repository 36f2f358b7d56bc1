"""Back-tests: published runs, simulated from published figures.

Each input is marked as stated or assumed. Assumed inputs make the agreement weaker evidence, and
the docs name them.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.plan.simulation.inputs import DAY_S, HOUR_S, Inputs

_LLAMA_NODES, _LLAMA_DAYS, _LLAMA_INTERRUPTIONS = 2048, 54.0, 466
LLAMA_NODE_MTBF_S = _LLAMA_NODES * _LLAMA_DAYS * DAY_S / _LLAMA_INTERRUPTIONS
"""466 interruptions of 2,048 nodes in 54 days: one per node in about 237 days."""


@dataclass(frozen=True)
class Published:
    """A published run, its reported goodput, and the inputs that represent it."""

    name: str
    source: str
    reported: float
    is_bound: bool
    """Whether it was reported as "more than": a lower bound instead of a value to match."""
    inputs: Inputs
    stated: tuple[str, ...]
    assumed: tuple[str, ...]


LLAMA_3 = Published(
    "Llama 3 405B, 16,384 GPUs",
    "The Llama 3 Herd of Models, section 3.3.4 (arXiv 2407.21783)",
    0.90,
    True,
    Inputs(
        num_nodes=_LLAMA_NODES,
        node_mtbf_s=LLAMA_NODE_MTBF_S,
        days=_LLAMA_DAYS,
        save_s=5.0,
        detect_s=60.0,
        restart_s=540.0,
        hardware=0.78,
        spares=64,
    ),
    ("16,384 GPUs, 8 per node", "54 days", "466 interruptions", "78% of them hardware"),
    (
        "a checkpoint blocks training for 5 s",
        "10 minutes until training continues (what Meta later reported at larger scale)",
        "spare nodes are available",
        "checkpoints at Daly's interval",
    ),
)

BYTEROBUST = Published(
    "ByteRobust, 9,600 GPUs",
    "Robust LLM Training Infrastructure at ByteDance (arXiv 2509.16293)",
    0.97,
    False,
    Inputs(
        num_nodes=1200,
        node_mtbf_s=LLAMA_NODE_MTBF_S,
        days=90.0,
        save_s=0.1,
        interval_s=30.0,
        step_time_s=30.0,
        detect_s=120.0,
        restart_s=180.0,
        hardware=0.8,
        spares=40,
    ),
    ("9,600 GPUs", "three months", "warm standby machines", "checkpoints at almost no cost"),
    (
        "nodes fail as often as Llama 3's",
        "a step takes 30 s, with a checkpoint after each",
        "2 minutes to detect and 3 to resume",
    ),
)

_LARGE_NODES = 12_500
_LARGE_MTBF_S = 18 * 60.0
"""Not in the abstract: chosen so that the synchronous run matches the report."""

SYNCHRONOUS = Published(
    "Meta, about 100,000 GPUs, synchronous",
    "Training LLMs with Fault Tolerant HSDP on 100,000 GPUs (arXiv 2602.00277)",
    0.44,
    False,
    Inputs(
        num_nodes=_LARGE_NODES,
        node_mtbf_s=_LARGE_NODES * _LARGE_MTBF_S,
        days=14.0,
        save_s=30.0,
        detect_s=60.0,
        restart_s=540.0,
        hardware=0.78,
        spares=400,
    ),
    ("about 100,000 GPUs", "10 minutes of stall per failure"),
    ("a failure every 18 minutes (fitted to this row)", "a checkpoint blocks training for 30 s"),
)

FT_HSDP = Published(
    "the same with FT-HSDP",
    SYNCHRONOUS.source,
    0.80,
    False,
    Inputs(
        num_nodes=_LARGE_NODES,
        node_mtbf_s=_LARGE_NODES * _LARGE_MTBF_S,
        days=14.0,
        policy="live",
        num_replicas=16,
        stall_s=180.0,
        save_s=30.0,
        interval_s=HOUR_S,
        detect_s=60.0,
        restart_s=540.0,
    ),
    ("3 minutes of stall per failure", "only the replica that failed restarts"),
    ("a failure every 18 minutes, as in the row above", "16 replicas", "a checkpoint every hour"),
)

ALL = (LLAMA_3, BYTEROBUST, SYNCHRONOUS, FT_HSDP)
