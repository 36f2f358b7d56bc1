"""Checkpointer: `save`, `wait`, `load`. A checkpoint exists once its manifest does.

A save copies the tensors, which is the only part that blocks a step, and continues in a thread: the
ranks agree on which rank writes what, each rank writes its file, and once all files are durable,
rank 0 writes the manifest. A failed save leaves no checkpoint, costs no step, and is retried at the
next step.
"""

from __future__ import annotations

import copy
import errno
import json
import pickle
import platform
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from drivetrain._version import __version__
from drivetrain.checkpoint import catalogue, lineage, pins
from drivetrain.checkpoint.access import refusals_named
from drivetrain.checkpoint.contract import Change, Contract
from drivetrain.checkpoint.failures import causes, is_of_the_storage, no_good_one, reason, stale
from drivetrain.checkpoint.fitting import check_same_model, check_shapes
from drivetrain.checkpoint.frozen import check_base
from drivetrain.checkpoint.manifest import (
    NAME,
    Contents,
    DamagedCheckpoint,
    File,
    Manifest,
    Reference,
    folder_name,
)
from drivetrain.checkpoint.retention import outdated
from drivetrain.checkpoint.shards import ShardReader, ShardWriter, SharePlanner
from drivetrain.checkpoint.sharing import Sharing
from drivetrain.checkpoint.staging import CopyInMemory
from drivetrain.checkpoint.state import TrainingState, own_name, unpack
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.unchanged import Base
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import EnvironmentProblem, NotSaved, Problem
from drivetrain.parallel.parts import on_host, whole
from drivetrain.parallel.world import World

Result = TypeVar("Result")


@dataclass(frozen=True)
class Saved:
    """The outcome of a save."""

    step: int
    blocked_s: float
    """How long the save blocked the step."""
    beside_s: float
    """How long the save ran beside the steps."""
    problem: str = ""
    """Why the save failed; empty if it succeeded."""
    written_bytes: int | None = None
    """Bytes written by all ranks; None if unknown."""
    referred_bytes: int | None = None
    """Bytes of the checkpoint that are in earlier checkpoints' files (`checkpoint.incremental`)."""


@dataclass
class _Pending:
    step: int
    folder: str
    future: Future[Any]
    began_s: float
    blocked_s: float
    writer: ShardWriter | None = None


_CLAIM_TRIES, _PAUSE_S = 3, 2.0


class Checkpointer:
    """Saves and loads one run's checkpoints, within one attempt."""

    def __init__(
        self,
        storage: Storage,
        rule: Checkpoint,
        world: World,
        strategy: str,
        contract: Contract | None = None,
    ) -> None:
        self.from_first_rank: tuple[str, ...] = ()
        """State that every rank took from rank 0, because the run was saved in another layout."""
        self.storage = storage
        self.attempt = 0
        self.changes: list[Change] = []
        """Settings that differ from those of the loaded checkpoint."""
        self.skipped: dict[str, str] = {}
        """Checkpoints that could not be loaded, with the reason; a loaded one is older."""
        self.scores: dict[int, float] = {}
        """By step: the metric that `keep_best` compares."""
        self.copied_bytes = 0
        """Host memory that this rank's copy for the latest save takes."""
        self._rule = rule
        self._world = world
        self._strategy = strategy
        self._contract = contract or Contract()
        # saves communicate while steps run, so they need their own group
        self._group = dist.new_group(backend="gloo") if world.mesh is not None else None
        self._sharing = Sharing(self._group)
        self._stager = CopyInMemory(world.accelerator)
        self._base = Base()
        """This rank's pieces in the last complete checkpoint, for an incremental save."""
        self._pending: _Pending | None = None

    def claim(self, step: int, at_least: int = 1) -> int:
        """Become the attempt that owns the run, resuming from `step`. A collective call."""
        answer = ""
        if self._world.is_main:
            answer = self._claim(step, at_least)
        answer = self._world.agree(answer)
        if not answer.isdecimal():
            raise NotSaved(answer)
        self.attempt = int(answer)
        return self.attempt

    def _claim(self, step: int, at_least: int) -> str:
        """Return the attempt's number, or why it could not be claimed. Retry on a full disk."""
        for left in reversed(range(_CLAIM_TRIES)):
            try:
                with refusals_named(self.storage.address):
                    return str(lineage.claim_next(self.storage, step, at_least).attempt)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise  # a new attempt may succeed
                problem = error
            time.sleep(_PAUSE_S if left else 0.0)
        return (
            f"cannot write to {self.storage.address} ({reason(problem)}), so no step of this "
            "attempt could be saved; free some space or make the directory writable, then run the "
            "same command again"
        )

    def save(
        self,
        state: TrainingState,
        step: int,
        position: Mapping[str, Any],
        *,
        contents: Contents = "everything",
    ) -> Saved | None:
        """Start a save. Wait for the previous one first, and return its outcome."""
        before = self.wait()
        began = time.perf_counter()
        tensors, values = (state.weights(), {}) if contents == "weights" else state.everything()
        if state.base is not None:
            left_out = state.base.unchanged()
            values["frozen"] = state.base.fingerprints(left_out)
            tensors = {name: value for name, value in tensors.items() if name not in left_out}
        writes_alone = self._rule.save == "full"
        if writes_alone:
            tensors = self._gathered(tensors)
        manifest = Manifest(
            step=step,
            attempt=self.attempt,
            layout=asdict(self._world.layout),
            strategy=self._strategy,
            position=dict(position),
            contents=contents,
            values=_json(values),
            contract=self._contract.terms,
            versions=versions(),
            created_s=time.time(),
        )
        if writes_alone and not self._world.is_main:
            return before
        folder = folder_name(step, self.attempt)
        self._stager.changes_in_forward = state.changes_in_forward()
        no_dist = writes_alone or self._group is None
        if no_dist:
            _expect_one_process()
        writer = ShardWriter(
            self.storage,
            folder,
            self._world.rank,
            lambda files, referred: self._commit(manifest, files, referred),
            self._stager.synchronize_staging,
            None if no_dist else self._group,
            self._base if self._rule.incremental else None,
        )
        future = async_save(
            tensors,
            storage_writer=writer,
            planner=SharePlanner(Sharing(None) if no_dist else self._sharing),
            # a single process sends nothing, but torch requires a group with a CPU backend
            process_group=self._group or self._world.host_group,
            async_stager=self._stager,
            no_dist=no_dist,
            # the ranks exchange what they need in `sharing` and in `finish`
            use_collectives=False,
        )
        self.copied_bytes = self._stager.num_bytes
        ended = time.perf_counter()
        self._pending = _Pending(step, folder, _as_future(future), ended, ended - began, writer)
        if not self._rule.asynchronous:
            return self.wait()
        return before

    @property
    def is_copying(self) -> bool:
        """True while a save may still be reading the tensors it was given."""
        return self._stager.is_copying

    def before_change(self) -> None:
        """Call this before changing tensors that are being saved."""
        self._stager.before_change()

    def poll(self) -> Saved | None:
        """Return the pending save's outcome if it has finished; never blocks."""
        return self.wait() if self._pending is not None and self._pending.future.done() else None

    def wait(self) -> Saved | None:
        """Wait for the pending save and return its outcome; None if no save is pending."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        problem = ""
        try:
            pending.future.result()
        except BaseException as error:
            fenced_off = stale(error)
            if fenced_off is not None:
                raise fenced_off from None
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            # another rank may have died after the checkpoint was written and committed
            if self.storage.size(f"{pending.folder}/{NAME}") is None:
                problem = reason(error)
                if self._world.is_main:
                    self.storage.remove(pending.folder)
        self._stager.written()
        now = time.perf_counter()
        saved = Saved(pending.step, pending.blocked_s, now - pending.began_s, problem)
        writer = pending.writer
        if writer is None or writer.base is None:
            return saved  # the next save may still refer to the previous base
        self._base = writer.base
        return replace(
            saved, written_bytes=writer.written_bytes, referred_bytes=writer.referred_bytes
        )

    def good(self) -> list[Manifest]:
        """Return the complete checkpoints, newest first. Contents are checked on load."""
        return [entry.manifest for entry in catalogue.entries(self.storage) if entry.manifest]

    def load_newest(self, state: TrainingState) -> Manifest | None:
        """Load the newest good checkpoint; others are `skipped`. A collective call.

        Return None if there is no checkpoint. If there are some but none is good, raise
        EnvironmentProblem and change nothing.
        """
        self.check_claims()
        tried: dict[str, str] = {}
        has_damaged = False
        while True:
            looks = self._world.is_main or self._group is None
            folder = self._world.agree(self._next_folder(tried) if looks else "")
            if not folder:
                has_damaged |= looks and self._has_damaged()
                bad = ", ".join(f"{name} ({problem})" for name, problem in tried.items())
                if bad := self._world.agree(bad if has_damaged else ""):
                    raise no_good_one(bad, self.storage.address)
                return None
            try:
                return self.load(state, folder)
            except DamagedCheckpoint as error:
                tried[folder] = self.skipped[folder] = str(error)
                has_damaged = True

    def check_claims(self) -> None:
        """Raise EnvironmentProblem on every rank if a claim cannot be read. A collective call."""
        problems: tuple[Problem, ...] = ()
        if self._world.is_main or self._group is None:
            try:
                with refusals_named(self.storage.address):
                    lineage.read_claims(self.storage)
            except EnvironmentProblem as error:
                problems = error.problems
        said = self._world.agree(json.dumps([asdict(problem) for problem in problems]))
        if said != "[]":
            raise EnvironmentProblem([Problem(**each) for each in json.loads(said)])

    def _has_damaged(self) -> bool:
        return any(entry.state == "damaged" for entry in catalogue.entries(self.storage))

    def load(self, state: TrainingState, folder: str) -> Manifest:
        """Load one checkpoint, in any layout. A collective call."""
        manifest, reader = self._together(lambda: self._open(folder))
        # before anything is overwritten or allocated: load_targets() creates optimizer state
        own = self._together(lambda: self._own(state, manifest, reader))
        stored = set(reader.read_metadata().state_dict_metadata)
        frozen = manifest.values.get("frozen", {})
        if self._world.layout.pp == 1:  # a stage has only its own weights; the contract covers all
            weights = state.model_tensors()
            check_same_model(folder, weights, {*stored, *frozen})
            check_shapes(folder, {n: t for n, t in weights.items() if n in stored}, reader)
            check_base(folder, frozen, weights, self._world.sum_floats)
        self.changes = self._contract.compare(folder, manifest.contract)
        values = dict(manifest.values)
        if any(change.key == "optimizer.class" for change in self.changes):
            stored = {name for name in stored if not name.startswith("optimizer.")}
            del values["optimizer"]
        elif any(change.key.startswith("optimiz") for change in self.changes):
            # accepted: keep the current settings, and possibly other parameter groups
            values["optimizer"] = {**values["optimizer"], "groups": None}
        targets = state.load_targets()
        not_stored = sorted(targets.keys() - stored)
        targets = {name: tensor for name, tensor in targets.items() if name in stored}
        check_shapes(folder, targets, reader)
        self._read(targets, reader)
        state.forget([name for name in not_stored if name.startswith("optimizer.")])
        state.restore(values, own)
        if self._rule.incremental:
            self._base = reader.base()
        return manifest

    def _open(self, folder: str) -> tuple[Manifest, ShardReader]:
        # rank 0 has just checked every file's size; thousands of ranks should not repeat it
        manifest = catalogue.read_manifest(self.storage, folder, check_sizes=False)
        if manifest.contents == "weights":
            raise DamagedCheckpoint("it holds weights only, so a run cannot resume from it exactly")
        if not isinstance(manifest.values.get("frozen", {}), dict):
            raise DamagedCheckpoint("its fingerprints of frozen weights are not a mapping")
        reader = ShardReader(self.storage, manifest)
        reader.read_metadata()
        return manifest, reader

    def _own(self, state: TrainingState, manifest: Manifest, reader: ShardReader) -> dict[str, Any]:
        """Return this rank's own state; in another layout, only the user's objects of rank 0."""
        is_same = manifest.layout == asdict(self._world.layout)
        rank = self._world.rank if is_same else 0
        own = unpack(reader.tensor(MetadataIndex(own_name(rank), (0,))))
        taken = own if is_same else {name: own[name] for name in own if name in state.users}
        self.from_first_rank = () if is_same else tuple(sorted(taken))
        return taken

    def _together(self, read: Callable[[], Result]) -> Result:
        """Call `read`, and raise DamagedCheckpoint on every rank if one rank found damage."""
        problem, result = "", None
        try:
            result = read()
        except (DamagedCheckpoint, pickle.UnpicklingError, KeyError, FileNotFoundError) as error:
            # any other storage error is not damage: this rank fails and is restarted
            problem = (str(error) or type(error).__name__).splitlines()[0]
        if self._world.sum_floats([float(bool(problem))])[0]:
            raise DamagedCheckpoint(problem or "another rank found it damaged")
        return cast(Result, result)

    def _read(self, targets: dict[str, torch.Tensor], reader: ShardReader) -> None:
        if self._group is None:
            _expect_one_process()
        try:
            load(
                dict(targets),
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (DamagedCheckpoint, CheckpointException) as error:
            # one rank found damage, and torch has passed the error to all ranks
            if any(is_of_the_storage(cause) for cause in causes(error)):
                raise
            raise DamagedCheckpoint(reason(error)) from None

    def still_there(self, folder: str) -> bool:
        """True if rank 0 still finds the checkpoint. A collective call."""
        has = self._world.is_main and self.storage.size(f"{folder}/{NAME}") is not None
        return bool(self._world.agree("x" if has else ""))

    def _gathered(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the whole tensors and every rank's own state on rank 0; nothing on the others."""
        own = own_name(self._world.rank)
        mine = {own: tensors.pop(own)} if own in tensors else {}
        whole = mine | _full(tensors, keep=self._world.leads_stage)
        if self._group is None:
            return whole
        everyones: list[Any] = [None] * self._world.layout.world_size
        # rank 0 already has its own stage: only the other stages send theirs
        sent = mine if self._world.is_main else whole
        dist.gather_object(sent, everyones if self._world.is_main else None, group=self._group)
        if not self._world.is_main:
            return {}
        return whole | {name: tensor for part in everyones for name, tensor in part.items()}

    def elsewhere(self, storage: Storage) -> Checkpointer:
        """Return a copy for another run's checkpoints that uses the same process group."""
        other = copy.copy(self)
        other.storage = storage
        # checkpoints saved there refer to no other checkpoint
        other._rule = self._rule.model_copy(update={"incremental": False})  # noqa: SLF001
        return other

    def clean(self) -> None:
        """Remove the unfinished saves of earlier attempts."""
        for entry in catalogue.entries(self.storage, check_sizes=False):
            if entry.attempt < self.attempt and entry.state == "unfinished":
                self.storage.remove(entry.folder)  # not referred to, or its state were "base"

    def close(self) -> Saved | None:
        """Finish the pending save."""
        last = self.wait()
        self._stager.close()
        return last

    def _next_folder(self, tried: dict[str, str]) -> str:
        """Return the newest checkpoint that has not been tried; add those that cannot be."""
        for entry in catalogue.entries(self.storage):
            if entry.folder in tried or entry.state == "base":
                continue
            if entry.manifest is not None:
                return entry.folder
            tried[entry.folder] = self.skipped[entry.folder] = entry.problem
        return ""

    def _commit(
        self, manifest: Manifest, files: Sequence[File], referred: tuple[Reference, ...]
    ) -> None:
        """Write the manifest, which completes the checkpoint; on rank 0, in the save's thread."""
        lineage.check_not_stale(self.storage, self.attempt)
        whole = replace(manifest, files=tuple(files))
        if self._rule.incremental:
            whole = replace(whole, referred=referred)
        self.storage.put(f"{manifest.folder}/{NAME}", whole.to_json())
        try:
            self._drop_outdated()
        except Exception as error:  # an old checkpoint that stays must not fail the new one
            warnings.warn(f"an outdated checkpoint was not deleted: {error}", stacklevel=2)

    def amend(self, step: int, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Change the values in this attempt's checkpoint of `step`, atomically. Call it on rank 0.

        For facts about a step that become known after it was saved; the tensors stay.
        """
        lineage.check_not_stale(self.storage, self.attempt)
        folder = folder_name(step, self.attempt)
        manifest = catalogue.read_manifest(self.storage, folder, check_sizes=False)
        whole = replace(manifest, values=_json(dict(change(manifest.values))))
        self.storage.put(f"{folder}/{NAME}", whole.to_json())

    def _drop_outdated(self) -> None:
        entries = catalogue.entries(self.storage, check_sizes=False)
        held = pins.pinned(self.storage)
        listed = [entry for entry in entries if entry.folder not in held]
        good = [entry.step for entry in listed if entry.manifest is not None]
        steps = outdated(good, self._rule, self.scores)
        going = [
            entry.folder
            for entry in listed
            if (entry.manifest is not None and entry.step in steps)
            # this attempt has a checkpoint now, so those of replaced attempts can go
            or (entry.state == "replaced" and entry.attempt < self.attempt)
            # former checkpoints that were kept because others referred to their files
            or (entry.state in ("base", "unfinished") and entry.attempt <= self.attempt)
        ]
        needed = {path for e in entries if e.folder not in going for path in e.refers_to}
        for folder in going:
            self._delete(folder, needed)

    def _delete(self, folder: str, needed: Collection[str]) -> None:
        """Delete a checkpoint, except for files that others refer to."""
        self.storage.remove(
            f"{folder}/{NAME}"
        )  # first, so that a half-deleted checkpoint never counts
        names = self.storage.names(folder)
        unneeded = [name for name in names if f"{folder}/{name}" not in needed]
        if len(unneeded) == len(names):
            self.storage.remove(folder)
            return
        for name in unneeded:
            self.storage.remove(f"{folder}/{name}")


def _expect_one_process() -> None:
    """Silence torch's warning about a single process, which may be raised as an error."""
    # not catch_warnings: the save runs in a thread, and the filters belong to the whole process;
    # not each time: a new filter makes Python repeat warnings that it has already shown
    message = "torch.distributed is disabled, unavailable"
    if not any(e[0] == "ignore" and e[1] and e[1].match(message) for e in warnings.filters):
        warnings.filterwarnings("ignore", message=message)


def _as_future(result: Any) -> Future[Any]:
    future: Future[Any] = getattr(result, "upload_completion", result)
    return future


def _full(tensors: dict[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Gather whole tensors on the ranks that `keep` them."""
    kept = {}
    for name, tensor in tensors.items():
        full = on_host(whole(tensor))
        if keep:
            kept[name] = full
    return kept


def versions() -> dict[str, str]:
    """Return the versions of drivetrain, torch and Python."""
    return {
        "drivetrain": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _json(values: Any) -> Any:
    return json.loads(json.dumps(values))
