"""Every collective on real ranks: nothing is wrong, and what is made wrong is counted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import measure
from drivetrain.collectives.bench import run
from drivetrain.collectives.operations import Form, Member, Prepared, prepare
from drivetrain.collectives.request import OPERATIONS, REDUCING, CollectivesRequest, rank_sets
from drivetrain.core.errors import ConfigError
from drivetrain.testing import run_ranks

CALLS = 3


def every_operation() -> dict[str, Any]:
    """Wrong elements by type, operation and size, over all ranks and both placements."""
    ranks = rank_sets([0] * dist.get_world_size(), {})[0]
    found: dict[str, Any] = {}
    for dtype in ("float", "bfloat16", "uint8"):
        asked = CollectivesRequest(OPERATIONS, (512, 1 << 16), dtype=dtype, calls=CALLS)
        member = measure.join(ranks, torch.device("cpu"))
        for row in measure.measure(asked, ranks, member):
            found[f"{dtype} {row.operation} {row.num_bytes}"] = row.wrong
            assert row.timed.calls == CALLS
            assert 0 < row.timed.p50_s <= row.timed.p99_s
            assert row.timed.slowest_s >= row.timed.time_s
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_wrong(ranks: int) -> None:
    results = run_ranks(every_operation, ranks)
    assert results[0] == results[-1]  # every rank knows of all
    assert len(results[0]) == 3 * (2 * (len(OPERATIONS) - 1) + 1)
    assert not any(results[0].values()), results[0]


def _damaged(operation: str, member: Member, form: Form) -> Prepared | None:
    """One element of what each rank receives is off by one after the call."""
    made = prepare(operation, member, form)
    if made is None or not made.received:
        return made

    def call() -> None:
        made.call()
        made.received[-1][0][-1] += 1

    return replace(made, call=call)


def damaged_operations() -> dict[str, list[int | None]]:
    measure.prepare = _damaged  # type: ignore[attr-defined]
    ranks = rank_sets([0] * dist.get_world_size(), {})[0]
    asked = CollectivesRequest(OPERATIONS, (512,), calls=1)
    member = measure.join(ranks, torch.device("cpu"))
    return {
        row.operation: [
            None if each is None else each.wrong for each in (row.out_of_place, row.in_place)
        ]
        for row in measure.measure(asked, ranks, member)
    }


def test_a_planted_corruption_is_counted_element_by_element() -> None:
    """Two checks, one element each on every rank that receives."""
    everyone, root = 2 * 2, 2
    assert run_ranks(damaged_operations, 2)[0] == {
        "all_reduce": [None, everyone],
        "all_gather": [everyone, everyone],
        "reduce_scatter": [everyone, everyone],
        "broadcast": [None, everyone],
        "all_to_all": [everyone, None],
        "reduce": [None, root],
        "gather": [root, root],
        "scatter": [everyone, everyone],
        "send_recv": [everyone, None],
        "barrier": [None, None],
    }


def on_two_nodes(folder: str) -> str:
    """Ranks 0, 1 and 2, 3 believe that they are on two nodes."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    asked = CollectivesRequest(
        REDUCING,
        (512, 4096, 1 << 16),
        axes={"tp": 2, "dp_shard": -1},
        calls=2,
        line_rate_bytes_per_s=1e9,
        json_file=f"{folder}/found.json",
        cluster_file=f"{folder}/cluster.yaml",
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run(asked)
    return said.getvalue()


def test_rows_for_all_ranks_inside_between_and_each_axis(tmp_path: Path) -> None:
    said = run_ranks(on_two_nodes, 4, args=(str(tmp_path),))
    assert said[1:] == ["", "", ""]  # rank 0 speaks
    assert "# all_reduce: inside a node, 2 groups of 2" in said[0]
    assert "# Out of bounds values : 0 OK" in said[0]
    document = json.loads((tmp_path / "found.json").read_text())
    groups = {each["name"]: each["groups"] for each in document["sets"]}
    assert groups == {
        "world": [[0, 1, 2, 3]],
        "inside a node": [[0, 1], [2, 3]],
        "between nodes": [[0, 2], [1, 3]],
        "axis dp_shard": [[0, 2], [1, 3]],
        "axis tp": [[0, 1], [2, 3]],
    }
    assert all(len(each["rows"]) == 9 for each in document["sets"])
    assert "between:" in (tmp_path / "cluster.yaml").read_text()


def test_the_verb(tmp_path: Path) -> None:
    words = "bench collectives --nproc-per-node 2 --ops all_reduce,barrier --max-bytes 128"
    command = [sys.executable, "-m", "drivetrain", *words.split(), "--json", "found.json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "# Out of bounds values : 0 OK" in ended.stdout
    document = json.loads((tmp_path / "found.json").read_text())
    (world,) = document["sets"]
    assert [row["size"] for row in world["rows"]] == [8, 32, 128, 0]


def test_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="collectives need at least two ranks"):
        run(CollectivesRequest(OPERATIONS, (8,)))


def test_on_a_target_the_same_ranks_are_asked_for(tmp_path: Path) -> None:
    words = "bench collectives --on slurm --nodes 2 --gpus-per-node 8 --ops barrier --dry-run"
    command = [sys.executable, "-m", "drivetrain", *words.split(), "--json", "found.json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "#SBATCH --job-name=bench" in ended.stdout
    assert """drivetrain.collectives.bench '{"operations": ["barrier"]""" in ended.stdout
    assert f'"json_file": "{tmp_path}/found.json"' in ended.stdout
