"""Checkpointer: `save`, `wait`, `load`. A checkpoint exists once its manifest does.

A save copies what it needs (that is all a step waits for) and goes on in a thread: ranks settle who
writes what, every rank writes its file, and when all are safe rank 0 writes the manifest. A save
that fails leaves no checkpoint, costs no step, and is tried again at the next.
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
    """A save that is over."""

    step: int
    blocked_s: float
    """What the step waited for."""
    beside_s: float
    """How long it went on beside the steps."""
    problem: str = ""
    """Why there is no checkpoint."""
    written_bytes: int | None = None
    """By all ranks together; None: not known."""
    referred_bytes: int | None = None
    """Of it that earlier checkpoints' files have (`checkpoint.incremental`)."""


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
    """One run's checkpoints, as one attempt writes them."""

    def __init__(
        self,
        storage: Storage,
        rule: Checkpoint,
        world: World,
        strategy: str,
        contract: Contract | None = None,
    ) -> None:
        self.from_first_rank: tuple[str, ...] = ()
        """What every rank has of rank 0's, since the run was saved by ranks in another layout."""
        self.storage = storage
        self.attempt = 0
        self.changes: list[Change] = []
        """What is not as it was when the loaded checkpoint was saved."""
        self.scores: dict[int, float] = {}
        """By step: the metric that `keep_best` goes by."""
        self.copied_bytes = 0
        """Of this rank's host memory that the latest save was copied to."""
        self._rule = rule
        self._world = world
        self._strategy = strategy
        self._contract = contract or Contract()
        # saves talk beside the steps, so they need lines of their own
        self._group = dist.new_group(backend="gloo") if world.mesh is not None else None
        self._sharing = Sharing(self._group)
        self._stager = CopyInMemory(world.accelerator)
        self._base = Base()
        """What the last complete checkpoint has of this rank, for an incremental save."""
        self._pending: _Pending | None = None

    def claim(self, step: int, at_least: int = 1) -> int:
        """Become the attempt that owns the run, going on from `step`. A collective call."""
        answer = ""
        if self._world.is_main:
            answer = self._claim(step, at_least)
        answer = self._world.agree(answer)
        if not answer.isdecimal():
            raise NotSaved(answer)
        self.attempt = int(answer)
        return self.attempt

    def _claim(self, step: int, at_least: int) -> str:
        """The attempt's number, or why there is none. A full disk may have room again soon."""
        for left in reversed(range(_CLAIM_TRIES)):
            try:
                with refusals_named(self.storage.address):
                    return str(lineage.claim_next(self.storage, step, at_least).attempt)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise  # another attempt may well get through
                problem = error
            time.sleep(_PAUSE_S if left else 0.0)
        return (
            f"nothing can be written to {self.storage.address} ({reason(problem)}), so no step of "
            "this attempt could be saved; make room, or see that it can be written, and start the "
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
        """Begin a save; the outcome of the one before, which has to be over first."""
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
            # one process alone sends nothing, but torch asks its group for a CPU backend
            process_group=self._group or self._world.host_group,
            async_stager=self._stager,
            no_dist=no_dist,
            # what ranks must know of each other they tell in `sharing`, and when they finish
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
        """Whether a save may still be reading the tensors it was given."""
        return self._stager.is_copying

    def before_change(self) -> None:
        """The tensors that are being saved are about to change."""
        self._stager.before_change()

    def poll(self) -> Saved | None:
        """The save under way, if it is over; never waits."""
        return self.wait() if self._pending is not None and self._pending.future.done() else None

    def wait(self) -> Saved | None:
        """The save under way, once it is over; None when there is none."""
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
            # another rank may have died when all was written and committed already
            if self.storage.size(f"{pending.folder}/{NAME}") is None:
                problem = reason(error)
                if self._world.is_main:
                    self.storage.remove(pending.folder)
        self._stager.written()
        now = time.perf_counter()
        saved = Saved(pending.step, pending.blocked_s, now - pending.began_s, problem)
        writer = pending.writer
        if writer is None or writer.base is None:
            return saved  # what there was before is still what the next save may refer to
        self._base = writer.base
        return replace(
            saved, written_bytes=writer.written_bytes, referred_bytes=writer.referred_bytes
        )

    def good(self) -> list[Manifest]:
        """Checkpoints that look whole, newest first. Their contents are checked on load."""
        return [entry.manifest for entry in catalogue.entries(self.storage) if entry.manifest]

    def load_newest(self, state: TrainingState) -> Manifest | None:
        """Load the newest good checkpoint; the damaged ones are named and passed over. Collective.

        None when there is no checkpoint at all; when there are some and none is good, a person must
        decide, and nothing is touched.
        """
        self.check_claims()
        tried: set[str] = set()
        damaged = ""
        while True:
            looks = self._world.is_main or self._group is None
            folder = self._next_folder(tried) if looks else ""
            if looks and not folder:
                damaged = max((e.folder for e in self._damaged()), default=damaged)
            folder = self._world.agree(folder)
            if not folder:
                damaged = self._world.agree(damaged)
                if damaged:
                    raise no_good_one(damaged, self.storage.address)
                return None
            try:
                return self.load(state, folder)
            except DamagedCheckpoint as error:
                tried.add(folder)
                damaged = folder
                if self._world.is_main:
                    warnings.warn(f"checkpoint {folder} was passed over: {error}", stacklevel=2)

    def check_claims(self) -> None:
        """EnvironmentProblem, on every rank, if one cannot be read, or none. Collective."""
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

    def _damaged(self) -> list[catalogue.Entry]:
        return [e for e in catalogue.entries(self.storage) if e.state == "damaged"]

    def load(self, state: TrainingState, folder: str) -> Manifest:
        """Load one checkpoint at whatever layout this is. A collective call."""
        manifest, reader = self._together(lambda: self._open(folder))
        # before anything is overwritten, or made for it: targets bring optimizer state into being
        own = self._together(lambda: self._own(state, manifest, reader))
        stored = set(reader.read_metadata().state_dict_metadata)
        frozen = manifest.values.get("frozen", {})
        if self._world.layout.pp == 1:  # a stage has its own weights only; the contract knows all
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
            # accepted: settings are those of now, and there may be other groups
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
        # rank 0 has just looked at every file's size; at scale that is not for everybody to repeat
        manifest = catalogue.read_manifest(self.storage, folder, check_sizes=False)
        if manifest.contents == "weights":
            raise DamagedCheckpoint("it holds weights only; nothing can resume from it exactly")
        if not isinstance(manifest.values.get("frozen", {}), dict):
            raise DamagedCheckpoint("its fingerprints of what is frozen are none")
        reader = ShardReader(self.storage, manifest)
        reader.read_metadata()
        return manifest, reader

    def _own(self, state: TrainingState, manifest: Manifest, reader: ShardReader) -> dict[str, Any]:
        """What this rank alone had; of ranks that were arranged otherwise, rank 0's, for users."""
        is_same = manifest.layout == asdict(self._world.layout)
        rank = self._world.rank if is_same else 0
        own = unpack(reader.tensor(MetadataIndex(own_name(rank), (0,))))
        taken = own if is_same else {name: own[name] for name in own if name in state.users}
        self.from_first_rank = () if is_same else tuple(sorted(taken))
        return taken

    def _together(self, read: Callable[[], Result]) -> Result:
        """Damage that one rank meets is damage for all of them."""
        problem, result = "", None
        try:
            result = read()
        except (DamagedCheckpoint, pickle.UnpicklingError, KeyError, FileNotFoundError) as error:
            # any other error of the storage is no damage: this rank fails, and is started again
            problem = (str(error) or type(error).__name__).splitlines()[0]
        if self._world.sum_floats([float(bool(problem))])[0]:
            raise DamagedCheckpoint(problem or "damaged, as another rank found")
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
            # one rank found damage; torch has told all of them
            if any(is_of_the_storage(cause) for cause in causes(error)):
                raise
            raise DamagedCheckpoint(reason(error)) from None

    def still_there(self, folder: str) -> bool:
        """Whether nobody has deleted it since; rank 0's word. A collective call."""
        has = self._world.is_main and self.storage.size(f"{folder}/{NAME}") is not None
        return bool(self._world.agree("x" if has else ""))

    def _gathered(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors and every rank's own, on rank 0; nothing on the others."""
        own = own_name(self._world.rank)
        mine = {own: tensors.pop(own)} if own in tensors else {}
        whole = mine | _full(tensors, keep=self._world.leads_stage)
        if self._group is None:
            return whole
        everyones: list[Any] = [None] * self._world.layout.world_size
        # rank 0 has its own stage already: only what is another's travels
        sent = mine if self._world.is_main else whole
        dist.gather_object(sent, everyones if self._world.is_main else None, group=self._group)
        if not self._world.is_main:
            return {}
        return whole | {name: tensor for part in everyones for name, tensor in part.items()}

    def elsewhere(self, storage: Storage) -> Checkpointer:
        """The same, for another run's checkpoints: to load from, over the same lines."""
        other = copy.copy(self)
        other.storage = storage
        # what is saved there stands alone
        other._rule = self._rule.model_copy(update={"incremental": False})  # noqa: SLF001
        return other

    def clean(self) -> None:
        """Remove what earlier attempts left unfinished."""
        for entry in catalogue.entries(self.storage, check_sizes=False):
            if entry.attempt < self.attempt and entry.state == "unfinished":
                self.storage.remove(entry.folder)  # nobody refers to it, or it were a base

    def close(self) -> Saved | None:
        """Finish the save under way."""
        last = self.wait()
        self._stager.close()
        return last

    def _next_folder(self, tried: set[str]) -> str:
        for entry in catalogue.entries(self.storage):
            if entry.folder in tried or entry.state == "base":
                continue
            if entry.manifest is not None:
                return entry.folder
            warnings.warn(
                f"checkpoint {entry.folder} was passed over: {entry.problem}", stacklevel=2
            )
            tried.add(entry.folder)
        return ""

    def _commit(
        self, manifest: Manifest, files: Sequence[File], referred: tuple[Reference, ...]
    ) -> None:
        """On rank 0, in the save's thread: from here on the checkpoint exists."""
        lineage.check_not_stale(self.storage, self.attempt)
        whole = replace(manifest, files=tuple(files))
        if self._rule.incremental:
            whole = replace(whole, referred=referred)
        self.storage.put(f"{manifest.folder}/{NAME}", whole.to_json())
        try:
            self._drop_outdated()
        except Exception as error:  # the new one is there; an old one that stays must not undo it
            warnings.warn(f"an outdated checkpoint was not deleted: {error}", stacklevel=2)

    def amend(self, step: int, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Other values for this attempt's checkpoint of `step`, at once; on rank 0.

        For what is found out about a step after it was saved; its tensors stay.
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
            # now that there is one of this attempt, others' can go
            or (entry.state == "replaced" and entry.attempt < self.attempt)
            # what once was one, and was kept for bytes that somebody referred to
            or (entry.state in ("base", "unfinished") and entry.attempt <= self.attempt)
        ]
        needed = {path for e in entries if e.folder not in going for path in e.refers_to}
        for folder in going:
            self._delete(folder, needed)

    def _delete(self, folder: str, needed: Collection[str]) -> None:
        """A checkpoint, but for files that others refer to."""
        self.storage.remove(f"{folder}/{NAME}")  # first: half of it never counts
        names = self.storage.names(folder)
        unneeded = [name for name in names if f"{folder}/{name}" not in needed]
        if len(unneeded) == len(names):
            self.storage.remove(folder)
            return
        for name in unneeded:
            self.storage.remove(f"{folder}/{name}")


def _expect_one_process() -> None:
    """A run on one rank is nothing torch need wonder about, and an error where warnings are."""
    # not catch_warnings: the save goes on in a thread, and what it restores is the whole process's;
    # not each time: a new filter makes Python show again what it has shown once
    message = "torch.distributed is disabled, unavailable"
    if not any(e[0] == "ignore" and e[1] and e[1].match(message) for e in warnings.filters):
        warnings.filterwarnings("ignore", message=message)


def _as_future(result: Any) -> Future[Any]:
    future: Future[Any] = getattr(result, "upload_completion", result)
    return future


def _full(tensors: dict[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors, on the rank that keeps them."""
    kept = {}
    for name, tensor in tensors.items():
        full = on_host(whole(tensor))
        if keep:
            kept[name] = full
    return kept


def versions() -> dict[str, str]:
    """What trains here."""
    return {
        "drivetrain": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _json(values: Any) -> Any:
    return json.loads(json.dumps(values))
