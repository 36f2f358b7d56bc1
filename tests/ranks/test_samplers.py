"""Samplers of the user's: the same batches on any number of ranks, or refused with the way out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from drivetrain.core.errors import ConfigError, WorkerFailure
from drivetrain.record import session
from drivetrain.testing import run_ranks
from tests.streams import sampler_kinds
from tests.streams.running import Step, train, used_in
from tests.streams.sampler_kinds import IS_RARE, KINDS, NUM_IDS, Ids

ACCEPTED = [kind for kind in KINDS if not kind.refused]


def body(names: list[str], workers: int, run: str) -> None:
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    for kind in KINDS + sampler_kinds.RANK_KINDS:
        if kind.name in names:
            train(kind.make, f"{run}/{kind.name}", {"data": {"num_workers": workers}})


def used(run: Path) -> dict[int, Step]:
    logs = sorted(name for name in os.listdir(run) if name.startswith("used-"))
    return used_in(str(run), [logs])


@pytest.fixture(autouse=True)
def _own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.RUN_DIR, "")
    monkeypatch.setattr(session, "_opened", 0)


@pytest.mark.slow
@pytest.mark.long
def test_any_number_of_ranks_sees_the_same_batches(tmp_path: Path) -> None:
    names = [kind.name for kind in ACCEPTED]
    for ranks, workers in ((1, 0), (2, 0), (3, 2), (4, 0)):
        run_ranks(body, ranks, args=(names, workers, str(tmp_path / f"{ranks}")))
    for name in names:
        alone = used(tmp_path / "1" / name)
        assert len(alone) >= 8
        assert {epoch for epoch, _ in alone.values()} == {0, 1}
        for ranks in (2, 3, 4):
            assert used(tmp_path / f"{ranks}" / name) == alone, (name, ranks)


def ids_of(steps: dict[int, Step]) -> list[int]:
    return [number for _, turns in steps.values() for _, *ids in turns for number in ids]


def test_what_a_sampler_draws_is_what_is_used(tmp_path: Path) -> None:
    body([kind.name for kind in ACCEPTED], 0, str(tmp_path))
    found = {kind.name: used(tmp_path / kind.name) for kind in ACCEPTED}
    weighted, repeated, buckets, _, curriculum = found.values()
    share = IS_RARE[torch.tensor(ids_of(weighted))].float().mean()
    assert 0.4 < share < 0.6, "one in ten, drawn as often as the others"
    assert len(ids_of(repeated)) == 2 * NUM_IDS
    assert ids_of(repeated)[0:3] == [ids_of(repeated)[0]] * 3
    assert sorted(ids_of(buckets)) == sorted([*range(NUM_IDS - 1)] * 2)
    assert sum(len(ids) - 1 == 1 for _, turns in buckets.values() for ids in turns) == 2
    first = torch.randperm(NUM_IDS, generator=torch.Generator().manual_seed(0))[: NUM_IDS // 2]
    assert ids_of(curriculum)[: NUM_IDS // 2] == first.tolist()


@pytest.mark.parametrize("name", [kind.name for kind in ACCEPTED])
def test_a_run_that_resumes_draws_the_same(name: str, tmp_path: Path) -> None:
    make = next(kind.make for kind in KINDS if kind.name == name)
    body([name], 0, str(tmp_path / "whole"))
    whole, run = used(tmp_path / "whole" / name), tmp_path / "run"
    last = max(whole)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Cut):
        patch.setattr("os.kill", _cut)
        train(make, str(run), {}, killed_at=last - 1)
    first = [log.rename(log.with_suffix(".first")).name for log in run.glob("used-*")]
    train(make, str(run), {})
    second = [log.name for log in run.glob("used-*.jsonl")]
    assert min(used_in(str(run), [second])) > len(whole) // 2, "in the second epoch"
    assert used_in(str(run), [first, second]) == whole


class _Cut(Exception):
    pass


def _cut(*_: Any) -> None:
    raise _Cut


@pytest.mark.parametrize("name", [kind.name for kind in KINDS if kind.refused])
def test_what_draws_from_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not follow the run's seed.*leave out its generator"):
        body([name], 0, str(tmp_path))


@pytest.mark.parametrize("kind", sampler_kinds.RANK_KINDS, ids=lambda kind: kind.name)
def test_a_sampler_of_one_rank_is_refused(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=kind.refused):
        run_ranks(body, 2, args=([kind.name], 0, str(tmp_path)))


def test_other_weights_must_be_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> Any:
        weights = torch.ones(NUM_IDS).tolist()
        sampler = torch.utils.data.WeightedRandomSampler(weights, NUM_IDS)
        return DataLoader(Ids(), 4, sampler=sampler)

    train(KINDS[0].make, str(tmp_path), {"num_train_epochs": None, "max_steps": 4})
    with pytest.raises(ConfigError, match="data.sampler"):
        train(other, str(tmp_path), {"num_train_epochs": None, "max_steps": 8})
    monkeypatch.setenv(session.ACCEPT_CHANGE, "data.sampler")
    train(other, str(tmp_path), {"num_train_epochs": None, "max_steps": 8})


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [
        (sampler_kinds.LongerThanItSays, "yields 60 ids in epoch 0, but its len\\(\\) is 59"),
        (sampler_kinds.WithoutLength, "does not say how long an epoch is.*give it a __len__"),
    ],
)
def test_a_length_must_be_true(sampler: Any, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rule):
        train(lambda: DataLoader(Ids(), 4, sampler=sampler()), str(tmp_path), {})


def test_batches_of_a_batch_sampler_are_micro_batches(tmp_path: Path) -> None:
    make = KINDS[2].make
    with pytest.raises(ConfigError, match="batches of up to 2 ids.*set micro_batch_size=2"):
        train(make, str(tmp_path / "wrong"), {"micro_batch_size": 4})
    train(make, str(tmp_path / "auto"), {"micro_batch_size": "auto"})
    sizes = {len(ids) - 1 for _, turns in used(tmp_path / "auto").values() for ids in turns}
    assert sizes == {1, 2}


def test_validation_goes_by_its_sampler(tmp_path: Path) -> None:
    import drivetrain

    seen: list[int] = []

    def metrics(model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.extend(batch.tolist())
        return {"loss": model(batch[:, None].float()).mean()}

    config = {"global_batch_size": 4, "output_dir": str(tmp_path), "record": {"sinks": []}}
    model = torch.nn.Linear(1, 1)
    loop = drivetrain.prepare(model, None, Ids(), {**config, "max_steps": 1})
    chosen = SubsetRandomSampler([3, 5, 7, 11, 13])
    result = loop.evaluate(DataLoader(Ids(), 2, sampler=chosen), metrics)
    assert sorted(seen) == [3, 5, 7, 11, 13]
    assert result.num_samples == 5
