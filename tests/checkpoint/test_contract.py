"""The contract of a run, and failures in their words."""

from __future__ import annotations

import errno
import pickle

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.checkpoint import lineage
from drivetrain.checkpoint.contract import Change, Contract, ContractChanged
from drivetrain.checkpoint.failures import RanksFailed, causes, is_of_the_storage, reason, stale


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("parallel.strategy", "ddp", "fsdp", "said"), "parallel.strategy: ddp → fsdp"),
        (
            Change("precision.tf32", False, True, "said"),
            "precision.tf32: false → true; matrix products round differently from here on",
        ),
        (
            Change("communication.compression", "none", "fp16", "said"),
            "communication.compression: none → fp16; gradients are communicated differently "
            "from here on",
        ),
        (
            Change("model.pretrained", "a", "b", "said"),
            "model.pretrained: a → b; the checkpoint's weights are used",
        ),
        (
            Change("torch", "2.13", "2.14", "said"),
            "torch: 2.13 → 2.14; its kernels may round differently",
        ),
        (
            Change("seed", 1, 2, "accepted"),
            "seed: 1 → 2 (accepted); this epoch's samples may be used twice, or not at all",
        ),
        (
            Change("optimization.learning_rate", 1, 2, "accepted"),
            "optimization.learning_rate: 1 → 2 (accepted)",
        ),
    ],
)
def test_a_change_is_said_with_its_meaning(change: Change, text: str) -> None:
    assert str(change) == text


@pytest.mark.parametrize("key", ["seed", "data.shuffle", "data.length"])
def test_changes_of_the_order_say_so(key: str) -> None:
    assert str(Change(key, 1, 2, "accepted")).endswith("used twice, or not at all")


@pytest.mark.parametrize("key", ["layout", "python", "drivetrain", "torch", "micro_batch_size"])
def test_what_need_not_be_accepted_is_only_said(key: str) -> None:
    (change,) = Contract({key: "new"}).compare("step-4", {key: "old"})
    assert change == Change(key, "old", "new", "said")


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [("ddp", "fsdp", "said"), ("ddp", "local_sgd", None), ("ddp", "nobody's", None)],
)
def test_another_strategy_is_fine_unless_it_trains_otherwise(
    before: str, now: str, outcome: str | None
) -> None:
    terms = {"parallel.strategy": now}
    if outcome is None:
        with pytest.raises(ContractChanged):
            Contract(terms).compare("step-4", {"parallel.strategy": before})
        accepted = Contract(terms, frozenset(terms))
        (change,) = accepted.compare("step-4", {"parallel.strategy": before})
        assert change.outcome == "accepted"
    else:
        (change,) = Contract(terms).compare("step-4", {"parallel.strategy": before})
        assert change.outcome == outcome


def test_terms_that_one_side_does_not_know_are_not_compared() -> None:
    contract = Contract({"a": None, "b": 2, "c": 3, "d": 0})
    assert contract.compare("step-4", {"a": 1, "b": None, "e": 5, "d": 0}) == []


def test_data_of_another_length_is_not_also_other_data() -> None:
    now = {"data.length": 10, "data.content": "x"}
    with pytest.raises(ContractChanged) as caught:
        Contract(now).compare("step-4", {"data.length": 9, "data.content": "y"})
    assert [change.key for change in caught.value.changes] == ["data.length"]
    with pytest.raises(ContractChanged) as caught:
        Contract(now).compare("step-4", {"data.length": 10, "data.content": "y"})
    assert [change.key for change in caught.value.changes] == ["data.content"]


def test_checkpoints_that_do_not_say_it_were_trained_with_what_was_then_so() -> None:
    terms = {"optimization.decay_norms_and_biases": False, "scheduler.class": "Mine"}
    with pytest.raises(ContractChanged) as caught:
        Contract(terms).compare("step-4", {"seed": 1})
    assert [(change.key, change.before) for change in caught.value.changes] == [
        ("optimization.decay_norms_and_biases", True),
        ("scheduler.class", "built-in"),
    ]
    assert Contract(terms).compare("step-4", {}) == [], "one without any terms is older still"


def test_a_refusal_comes_from_another_process_as_it_was() -> None:
    with pytest.raises(ContractChanged) as caught:
        Contract({"seed": 2, "torch": "b"}).compare("step-4", {"seed": 1, "torch": "a"})
    back = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (back.folder, back.changes, str(back)) == (
        "step-4",
        (Change("seed", 1, 2, "refused"), Change("torch", "a", "b", "said")),
        "seed = 2: was 1 when step-4 was saved; "
        "restore it, or add --accept-change seed before the script",
    )


def wrapped(*errors: BaseException) -> CheckpointException:
    return CheckpointException("save", {rank: (each, None) for rank, each in enumerate(errors)})  # type: ignore[misc]


def test_the_reason_is_the_ranks_own_in_one_line() -> None:
    assert reason(OSError("no room\nmore")) == "OSError: no room"
    assert reason(ValueError("  \n")) == "ValueError"
    assert reason(RanksFailed("rank 1: no room")) == "rank 1: no room"
    assert reason(wrapped(KeyError("a"))) == "KeyError: 'a'"


def test_what_other_ranks_met_is_found_in_what_torch_makes_of_it() -> None:
    taken = lineage.StaleAttempt("attempt 1 is over")
    error = wrapped(ValueError("x"), taken)
    assert causes(error) == [error, error.failures[0][0], taken]
    assert stale(error) is taken
    assert stale(taken) is taken
    assert stale(wrapped(ValueError("x"))) is None
    assert causes(taken) == [taken]


def test_a_read_that_fails_may_go_through_next_time_unless_the_file_is_gone() -> None:
    assert is_of_the_storage(OSError(errno.EIO, "bad"))
    assert not is_of_the_storage(FileNotFoundError("gone"))
    assert not is_of_the_storage(ValueError("x"))
