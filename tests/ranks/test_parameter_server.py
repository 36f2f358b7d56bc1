"""Parameter servers: ddp where they must be, one model whenever it is shown, nothing lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError, WorkerFailure
from drivetrain.record.session import RUN_DIR
from drivetrain.strategies.parameter_server.messages import Push, Reply, pack, rows_to_send, unpack
from drivetrain.strategies.parameter_server.server import Rules, Server
from drivetrain.strategies.parameter_server.strategy import ServedModel, assign
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.gpt_task import gpt_task
from tests.ranks.test_resume import SAVED, Kill, interrupted, train
from tests.ranks.training import assert_same_training, sentences, settings

STEPS = 20


def served(mode: str = "synchronous", **details: Any) -> dict[str, Any]:
    return {"strategy": "parameter_server", "parameter_server": {"mode": mode, **details}}


class HoldUp(Hook):
    """Rank 1 stays before its third step until rank 0 has begun a later one, and a while longer."""

    def __init__(self, folder: str, until: int) -> None:
        self.folder, self.until = Path(folder), until
        self.furthest = 0

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        rank = trainer.assembly.world.rank
        if rank == 0:
            (self.folder / f"begun-{step}").touch()
        elif step == 3:
            end_s = time.monotonic() + 60
            while not (self.folder / f"begun-{self.until}").exists() and time.monotonic() < end_s:
                time.sleep(0.01)
            time.sleep(0.3)
            begun = self.folder.glob("begun-*")
            self.furthest = max(int(path.name.partition("-")[2]) for path in begun)


def fit(output_dir: str, parallel: dict[str, Any], *hooks: Hook, **changes: Any) -> Trainer:
    config = settings(output_dir, **{"max_steps": STEPS, "parallel": parallel, **changes})
    trainer = Trainer(gpt_task(), config, hooks=list(hooks))
    trainer.fit(sentences())
    return trainer


def model_of(trainer: Trainer) -> ServedModel:
    assert trainer.assembly is not None
    spread = trainer.assembly.engine.spread
    assert isinstance(spread, ServedModel)
    return spread


def losses_of(trainer: Trainer) -> list[float]:
    return trainer.history.losses


def three_ways(output_dir: str) -> tuple[list[float], list[float], list[float]]:
    ways = (served(), served(sparse_rows=True), {"strategy": "ddp"})
    one, other, ddp = (losses_of(fit(output_dir, way)) for way in ways)
    return one, other, ddp


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, pytest.param(1, marks=pytest.mark.long)])
def test_synchronous_is_ddp(world_size: int, tmp_path: Path) -> None:
    """AdamW, clipping, schedule, samples of unequal length; nothing divides anything."""
    for whole, by_rows, ddp in run_ranks(three_ways, world_size, 120, args=(str(tmp_path),)):
        assert ddp[-1] < ddp[0]
        assert_same_training(whole, ddp)
        assert by_rows == whole, "rows that are left out change no bit"


def with_a_slow_rank(output_dir: str, parallel: dict[str, Any], until: int) -> dict[str, Any]:
    hold_up = HoldUp(output_dir, until)
    trainer = fit(output_dir, parallel, hold_up, record=_log_every(STEPS))
    spread = model_of(trainer)
    return {
        "losses": losses_of(trainer),
        "furthest": hold_up.furthest,
        "own": weights_sha256(trainer.model.state_dict()),
        "shown": weights_sha256(spread.full_state()),
        "staleness": spread.staleness.largest,
    }


def _log_every(steps: int) -> dict[str, Any]:
    return {"progress": "none", "sinks": [], "logging_steps": steps}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        pytest.param("asynchronous", None, marks=pytest.mark.long),
        ("stale_synchronous", 2),
        pytest.param("stale_synchronous", 0, marks=pytest.mark.long),
    ],
)
def test_a_slow_rank_holds_up_others_by_the_bound_alone(
    mode: str, bound: int | None, tmp_path: Path
) -> None:
    parallel = served(mode) if bound is None else served(mode, staleness_bound=bound)
    until = 15 if bound is None else 3 + bound
    fast, slow = run_ranks(with_a_slow_rank, 2, 180, args=(str(tmp_path), parallel, until))
    if bound is None:
        assert slow["furthest"] >= 15
        assert slow["staleness"] > 10
    else:
        assert slow["furthest"] == 3 + bound, "the slow rank has made two steps"
    assert fast["losses"] == slow["losses"], "the loss is that of the whole batch"
    assert fast["losses"][-1] < fast["losses"][0]
    digests = {fast["own"], slow["own"], fast["shown"], slow["shown"]}
    assert len(digests) == 1, "after the last step all ranks have the same weights"


SYNCHRONOUS: dict[str, Any] = {"parallel": served()}


@pytest.mark.slow
def test_a_killed_server_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Same bits as a run that was not killed: optimizer state comes back from every shard."""
    whole = run_ranks(train, 2, args=(str(tmp_path), None, SYNCHRONOUS))[0]
    resumed = interrupted(monkeypatch, tmp_path, (2, SYNCHRONOUS), (2, SYNCHRONOUS))
    assert resumed[1] == whole[1]
    assert resumed[0] == {step: loss for step, loss in whole[0].items() if step > SAVED}


@pytest.mark.slow
@pytest.mark.long
def test_another_number_of_servers_takes_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, _ = run_ranks(train, 2, args=(str(tmp_path), None, SYNCHRONOUS))[0]
    losses, _ = interrupted(monkeypatch, tmp_path, (2, SYNCHRONOUS), (3, SYNCHRONOUS))
    assert_same_training(list(losses.values()), [whole[step] for step in losses])


def count_updates(output_dir: str, kill_at: int | None) -> tuple[list[int], list[float]]:
    """Steps seen here, and how many updates each weight of this server has had in all."""
    hook = Kill(kill_at)
    checkpoint = {"every_steps": 10, "asynchronous": False}
    changes = {"max_steps": 60, "checkpoint": checkpoint}
    trainer = fit(output_dir, served("asynchronous"), hook, **changes)
    server = model_of(trainer)._server
    updates = [float(server.state_of(place)["step"]) for place in range(len(server.weights))]
    return [each.step for each in trainer.history.steps], updates


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_server_loses_no_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asynchronous: the bits differ, but every rank's every step was applied once."""
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "killed"))
    with pytest.raises(WorkerFailure):
        run_ranks(count_updates, 2, args=(str(tmp_path), 34))
    for steps, updates in run_ranks(count_updates, 2, args=(str(tmp_path), None)):
        assert steps == list(range(31, 61))
        assert updates
        assert set(updates) == {2 * 60.0}


def shard_of(mode: str, bound: int | None, num_workers: int = 2) -> tuple[Server, list[Any]]:
    """A server of two weights under plain SGD, and the replies it gives."""
    weights = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(()))]
    replies: list[Any] = []
    rules = Rules(num_workers, mode == "synchronous", bound, sparse_rows=True)
    optimizer = torch.optim.SGD(weights, lr=1.0)
    server = Server(
        weights, optimizer, rules, lambda worker, reply: replies.append((worker, reply))
    )
    return server, replies


def push(worker: int, clock: int, pulled: int, *gradients: torch.Tensor | None) -> Push:
    payload = pack(gradients, [None] * len(gradients))
    return Push(worker, clock, pulled, True, (1.0,), payload)


def test_staleness_counts_updates_since_the_pull() -> None:
    server, replies = shard_of("asynchronous", None)
    one = torch.ones(3, 2)
    for clock in (1, 2, 3):
        server.receive(push(0, clock, clock - 1, one, None))
    server.receive(push(1, 1, 0, one, torch.tensor(2.0)))
    assert [(worker, reply.version, reply.staleness) for worker, reply in replies] == [
        (0, 1, 0),
        (0, 2, 0),
        (0, 3, 0),
        (1, 4, 3),
    ]
    assert server.weights[0].tolist() == [[-4.0, -4.0]] * 3
    assert server.weights[1].item() == -2.0


def test_who_is_too_far_ahead_waits_for_the_slowest() -> None:
    server, replies = shard_of("stale_synchronous", 1)
    one = torch.ones(3, 2)
    server.receive(push(0, 1, 0, one, None))
    server.receive(push(0, 2, 1, one, None))
    assert [worker for worker, _ in replies] == [0], "two steps ahead of one that has made none"
    server.receive(push(1, 1, 0, one, None))
    assert [worker for worker, _ in replies] == [0, 0, 1]
    held: Reply = replies[1][1]
    assert (held.version, held.staleness) == (3, 0), "with the weights of now"


def test_a_worker_without_samples_moves_nothing() -> None:
    server, replies = shard_of("stale_synchronous", 0)
    server.receive(push(0, 1, 0, None, None))
    server.receive(push(1, 1, 0, None, None))
    assert server.version == 0
    assert [worker for worker, _ in replies] == [0, 1]


def test_only_rows_that_changed_are_pulled() -> None:
    server, replies = shard_of("asynchronous", None)
    gradient = torch.zeros(3, 2)
    gradient[1] = 5.0
    server.receive(push(0, 1, 0, gradient, None))
    matrix, number = unpack(replies[0][1].weights, server.weights)
    assert matrix is not None
    assert matrix.rows is not None
    assert number is not None
    assert matrix.rows.tolist() == [1]
    target = torch.full((3, 2), 7.0)
    matrix.into(target)
    assert target.tolist() == [[7.0, 7.0], [-5.0, -5.0], [7.0, 7.0]]


@pytest.mark.parametrize(("kind", "pays"), [(torch.optim.SGD, True), (torch.optim.AdamW, False)])
def test_rows_pay_where_an_optimizer_leaves_the_others_alone(kind: Any, pays: bool) -> None:
    """50,000 rows, of which each of two steps touches 1,500: Adam still moves the first ones."""
    table = nn.Parameter(torch.randn(50_000, 32))
    replies: list[Reply] = []
    rules = Rules(1, False, None, sparse_rows=True)
    optimizer = kind([table], lr=0.1)  # with weight decay, as AdamW has it
    server = Server([table], optimizer, rules, lambda _, reply: replies.append(reply))
    for clock, first in ((1, 0), (2, 25_000)):
        gradient = torch.zeros_like(table)
        gradient[first : first + 1_500] = 1.0
        payload = pack([gradient], [rows_to_send(gradient, gradient.ne(0).any(1))])
        assert payload is not None
        assert len(payload) < table.nbytes / 30, "a push is small under any optimizer"
        server.receive(Push(0, clock, clock - 1, True, (0.1,), payload))
        weights = replies[-1].weights
        assert weights is not None
        assert (len(weights) < table.nbytes / 30) == pays


def test_a_message_keeps_every_bit() -> None:
    half, number, matrix = (
        torch.randn(5, 3, dtype=torch.bfloat16),
        torch.tensor(float("nan")),
        torch.randn(40, 4),
    )
    rows = rows_to_send(matrix, torch.arange(40) % 9 == 0)
    payload = pack([half, None, number, matrix], [None, None, None, rows])
    assert payload is not None
    like = [half, half, number, matrix]
    first, left_out, second, last = unpack(payload, like)
    assert left_out is None
    assert first is not None
    assert torch.equal(first.values, half)
    assert second is not None
    assert second.values.isnan()
    assert last is not None
    assert last.rows is not None
    assert torch.equal(last.values, matrix[::9])
    with pytest.raises(RuntimeError, match="were decoded"):
        unpack(torch.cat([payload, torch.zeros(8, dtype=torch.uint8)]), like)


def test_shards_are_even_and_whole() -> None:
    assert assign([8, 1, 5, 4, 3], 2) == [0, 1, 1, 1, 0]  # 11 and 10
    assert assign([10], 3) == [0], "the others serve nothing"


class Clamp(Hook):
    """Changes weights behind the servers' back."""

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).clamp_(-0.5, 0.5)


def test_weights_that_are_changed_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="changed in place between two steps"):
        fit(str(tmp_path), served("asynchronous"), Clamp())


class HoldsWeights(torch.optim.SGD):
    """As sharpness-aware and Shampoo-like optimizers do."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.kept = parameters


def test_an_optimizer_that_keeps_weights_apart_is_refused() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    rules = Rules(1, True, None, sparse_rows=False)
    with pytest.raises(ConfigError, match="keeps weights in kept"):
        Server(weights, HoldsWeights(weights), rules, lambda *_: None)
