"""An error of the user's own code says whose it was; a traceback shows the user's own calls."""

from __future__ import annotations

import gc
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Hook, Task, Trainer
from drivetrain.core.errors import ConfigError, blame, raised_by, without_blame
from drivetrain.core.redaction import REMOVED, clean_traceback
from drivetrain.diagnose.stacks import own_calls
from drivetrain.record.run_directory import RunDirectory
from drivetrain.supervise.failures.attempt_report import AttemptReport, write_end
from drivetrain.supervise.failures.failure import RankFailure
from drivetrain.supervise.failures.reporting import paragraph
from drivetrain.supervise.policy import Budgets, End, EndKind, decide

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
GOOD = TensorDataset(X, (X.sum(1) > 0).long())


class Odd(Exception):
    """One of the user's own."""


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise Odd("cannot be decoded")
        return GOOD[index]


class Shorter(Broken):
    """Says that it has more than it has: noticed when its content is looked at, before a step."""

    def __getitem__(self, index: int) -> Any:
        if index == 15:
            raise Odd("only 15")
        return GOOD[index]


class BrokenStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (GOOD[index] for index in range(9))
        raise Odd("the stream broke")


class Late(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        raise Odd("hook broke")


class Unkept:
    def state_dict(self) -> dict[str, Any]:
        raise Odd("nothing to keep")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def refuse(samples: list[Any]) -> Any:
    raise Odd(f"{len(samples)} samples")


def broken_metrics(model: nn.Module, batch: Any) -> Any:
    raise Odd(f"{len(batch)}")


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "dataset": ("Broken.__getitem__(5)", {"train": Broken()}),
    "length": ("Shorter.__getitem__(15)", {"train": Shorter()}),
    "in a data worker": (
        "Broken.__getitem__(5)",
        {"train": DataLoader(Broken(), num_workers=1)},
    ),
    "stream": ("BrokenStream.__iter__, after 9 samples", {"train": BrokenStream()}),
    "collate": ("refuse (collate)", {"train": DataLoader(GOOD, collate_fn=refuse)}),
    "val": ("Broken.__getitem__(5)", {"val": Broken()}),
    "metrics": ("the evaluation after step", {"val": GOOD, "metrics": broken_metrics}),
    "hook": ("the hook Late.on_train_batch_end", {"hooks": [Late()]}),
    "stateful": ("state_dict of ema (stateful)", {"stateful": {"ema": Unkept()}}),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_says_whose_code_raised_it(quiet: dict[str, Any], name: str) -> None:
    who, parts = WRONG[name]
    config = {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 4, **quiet}
    config |= {"checkpoint": {"every_steps": 2}}
    task = Task(model=lambda: nn.Linear(4, 2), loss=mean, metrics=parts.get("metrics"))
    trainer = Trainer(task, config, hooks=parts.get("hooks", ()), stateful=parts.get("stateful"))
    text = ""
    try:
        trainer.fit(parts.get("train", GOOD), parts.get("val"))
    except Odd as error:  # its type is still the user's; kept, it would keep data workers alive
        text = "".join(traceback.format_exception(error))
    gc.collect()  # a loader that failed is part of a cycle
    assert raised_by(text).startswith(who)
    assert "raised by" not in without_blame(text)


def test_what_was_said_first_stays_and_our_own_words_need_no_addition() -> None:
    error = Odd("x")
    blame(error, "the dataset")
    blame(error, "the evaluation")
    assert error.__notes__ == ["raised by the dataset"]
    ours = ConfigError([])
    blame(ours, "the evaluation")
    assert not hasattr(ours, "__notes__")


TRACE = """Traceback (most recent call last):
  File "/home/ada/train.py", line 9, in <module>
    trainer.fit(data)
  File "/usr/lib/python3/site-packages/drivetrain/train/trainer.py", line 120, in fit
    self._train(assembly)
    ^^^^^^^^^^^^^^^^^^^^^
  File "/home/ada/hooks.py", line 31, in on_log
    upload(step, password="hunter2222")
  File "/usr/lib/python3/site-packages/uploads/client.py", line 3, in upload
    raise Odd
Odd: 403 for https://ada:geheim@example.org/
raised by the hook Upload.on_log
"""


def test_only_the_users_own_calls_and_the_one_that_raised_are_shown() -> None:
    short = own_calls(TRACE)
    assert "trainer.py" not in short
    assert "self._train" not in short
    for kept in ("train.py", "hooks.py", "password", "client.py", "raise Odd", "Odd: 403"):
        assert kept in short
    libraries = TRACE.replace("/home/ada", "/usr/lib/python3/site-packages")
    assert own_calls(libraries) == libraries


def failed(kind: EndKind = EndKind.FAILED, whole: Path | None = None) -> AttemptReport:
    end = End(kind, 3, fault=RankFailure(0, 10, 1, TRACE).fault)
    return AttemptReport(end, [RankFailure(0, 10, 1, TRACE)], "h", "", "", whole=whole)


def test_the_last_sentence_says_who_when_where_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "attempts" / "0001" / "tracebacks" / "00000.txt"
    file.parent.mkdir(parents=True)
    file.touch()
    said = paragraph(failed(whole=file))
    assert said.splitlines()[-1] == (
        "the hook Upload.on_log raised this after step 3, at hooks.py:31 in on_log: fix it; to "
        f"resume, run the same command again with --run-dir {tmp_path / 'mine'} before the script"
    )
    assert f"full traceback: {file}" in said
    assert "trainer.py" not in said
    unwritten = paragraph(failed(whole=tmp_path / "none.txt"))  # nowhere else to be read
    assert "trainer.py" in unwritten
    assert "none.txt" not in unwritten


def test_a_script_without_drivetrain_has_its_traceback_last() -> None:
    end = End(EndKind.START_UP, 0, trains=False)
    failure = RankFailure(0, 10, 1, TRACE.partition("raised by")[0])
    assert paragraph(AttemptReport(end, [failure], "h", "", "")).endswith("example.org/")


def test_a_step_is_named_once() -> None:
    text = TRACE.replace("the hook Upload.on_log", "the evaluation after step 4")
    account = AttemptReport(End(EndKind.FAILED, 3), [RankFailure(0, 10, 1, text)], "h", "", "")
    assert "\nthe evaluation after step 4 raised this, at hooks.py:31" in paragraph(account)


def test_where_fit_was_called_is_no_place_to_look_at() -> None:
    text = TRACE.replace("/home/ada/hooks", "/usr/lib/python3/site-packages/torch/collate")
    failure = RankFailure(0, 10, 1, text.replace("the hook Upload.on_log", "f (collate), given 4,"))
    account = AttemptReport(End(EndKind.FAILED, 3), [failure], "h", "", "")
    assert "\nf (collate), given 4, raised this after step 3: make the samples" in paragraph(
        account
    )


def test_an_error_of_the_users_that_comes_again_in_the_same_words_is_not_tried_a_third_time() -> (
    None
):
    fault = RankFailure(0, 10, 1, TRACE).fault  # of a type that nobody knows
    end = End(EndKind.FAILED, 3, fault=fault)
    assert decide(end, [], Budgets()).restart
    assert not decide(end, [end], Budgets()).restart
    other = RankFailure(0, 10, 1, TRACE.replace("403", "503")).fault
    assert decide(end, [End(EndKind.FAILED, 3, fault=other)], Budgets()).restart


def test_what_is_written_down_of_a_failure_has_no_secrets(tmp_path: Path) -> None:
    session, run = tmp_path / "session", RunDirectory(tmp_path / "run")
    session.mkdir()
    (session / "run-0").write_text(str(run.path))
    (session / "attempt").write_text("1")
    write_end(session, failed(), {})
    end = (run.attempt(1) / "end.json").read_text()
    whole = (run.attempt(1) / "tracebacks" / "00000.txt").read_text()
    for text in (end, whole, json.loads(end)["failures"][0]["error"]):
        assert "hunter2222" not in text
        assert "geheim" not in text
        assert REMOVED in text
    assert '  File "/home/ada/hooks.py", line 31, in on_log\n' in whole


def test_calls_stay_in_a_traceback_whatever_their_names() -> None:
    line = '  File "/home/ada/token=abcdefgh/train.py", line 31, in api_key\n'
    assert clean_traceback(line) == line
