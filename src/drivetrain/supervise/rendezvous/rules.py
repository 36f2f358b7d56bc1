"""torchelastic's rendezvous rules, applied in a directory without races.

In torch, every node changes its own copy of the list and tries to write it back with compare-and-
set; of many concurrent writers one succeeds and the others retry, which wastes most of the work of
a thousand nodes. Here a change is made under the directory's lock: read, change and write once per
node. A node that only waits reads a few bytes until what it waits for has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _Action,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousState,
    _RendezvousStateHolder,
)

from drivetrain.supervise.rendezvous.folder import Head, RendezvousFolder
from drivetrain.supervise.rendezvous.signs import Alive

# The last call of a round: how long other nodes may still join once there are enough.
#
# torch stores its end as a time of day, by the clock of the node that completed the minimum, and
# compares it with the clock of each node that reads it. Here each node counts from when it first
# saw that time, by its own clock, and shows torch a time in the distant past or future.

_PAST, _FUTURE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


class LastCall:
    """The last call of a round by this node's clock; it lasts `lasts_s`."""

    def __init__(self, lasts_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lasts_s = lasts_s
        self._clock = clock
        self._written: datetime | None = None
        self._over_s = 0.0

    def as_seen(self, deadline: datetime | None) -> datetime | None:
        """Return the deadline to show torch's rules, for one that is stored or was shown before."""
        if deadline is None:
            self._written = None
            return None
        if deadline not in (_PAST, _FUTURE, self._written):
            self._written, self._over_s = deadline, self._clock() + self._lasts_s
        return _PAST if self._clock() >= self._over_s else _FUTURE

    def as_written(self, deadline: datetime | None) -> datetime | None:
        """Return the deadline to store for the other nodes: a new one, or the stored one."""
        return self._written if deadline in (_PAST, _FUTURE) else deadline


_LOOK_S = 1.0
_WAITS = (_Action.SYNC, _Action.KEEP_ALIVE)
_Rule = Callable[[_RendezvousContext, float], _Action]


class ListOfNodes(_RendezvousStateHolder):
    """This node's copy of the list of nodes."""

    def __init__(self, folder: RendezvousFolder, settings: RendezvousSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._state = _RendezvousState()
        self._head = Head(0, 0)
        self._was_awaited = _awaited(self._state, settings)
        self._is_dirty = False
        interval_s = settings.keep_alive_interval.total_seconds()
        patience_s = interval_s * settings.keep_alive_max_attempt
        self._alive = Alive(self._sign, self._sign_now, patience_s, look_s=interval_s)
        self._interval_s = interval_s
        self._looked_s = 0.0
        self._signs: dict[str, str] = {}
        self._signs_s = 0.0
        self._last_call = LastCall(settings.timeout.last_call.total_seconds())
        self.only_turns = False
        """Whether to read only changes that nodes wait for."""
        self.is_joining = False
        """Whether to drop all dead nodes; a node that has joined drops only dead waiting ones."""

    @property
    def state(self) -> _RendezvousState:
        """The list as last read."""
        return self._state

    def mark_dirty(self) -> None:
        """Make the next sync() write. The caller must hold the lock."""
        self._is_dirty = True

    def sync(self) -> bool | None:
        """Write this node's changes, or read those of other nodes."""
        if self._is_dirty:
            self._write()
            return True
        head = self._folder.head()
        if head is None:
            self._state, self._head = _RendezvousState(), Head(0, 0)
        elif head.turn != self._head.turn or not (self.only_turns or head == self._head):
            self._read()
            self._leave_out_the_dead()
        elif time.monotonic() - self._looked_s >= self._interval_s:
            self._leave_out_the_dead()
        self._state.deadline = self._last_call.as_seen(self._state.deadline)
        return None

    def _read(self) -> None:
        found = self._folder.read()
        if found is not None:
            self._state, self._head = found
            self._was_awaited = _awaited(self._state, self._settings)

    def _write(self) -> None:
        self._state.deadline = self._last_call.as_written(self._state.deadline)
        awaited = _awaited(self._state, self._settings)
        turn = self._head.turn + (awaited != self._was_awaited)
        self._head, self._was_awaited = Head(self._head.version + 1, turn), awaited
        self._folder.write(self._state, self._head)
        self._is_dirty = False

    def _leave_out_the_dead(self) -> None:
        """Drop dead nodes: after each read, and then at the interval of the signs of life."""
        self._looked_s = time.monotonic()
        state = self._state
        dead = self._dead_of(state.last_heartbeats if self.is_joining else state.wait_list)
        was_taking_part = any(node in state.participants for node in dead)
        for node in dead:
            state.last_heartbeats.pop(node, None)
            state.participants.pop(node, None)
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
        if was_taking_part:
            _remove_participant_epilogue(state, self._settings)

    def _dead_of(self, nodes: Collection[_NodeDesc]) -> list[_NodeDesc]:
        return [node for node in nodes if self.is_dead(node)]

    def is_dead(self, node: _NodeDesc) -> bool:
        """True if a node has given no sign of life for too long, by this node's clock."""
        return self._alive.is_dead(node)

    def _sign(self, node: _NodeDesc) -> tuple[object, str] | None:
        """A node's sign, including the time it joined: a node that joins again is alive."""
        now_s = time.monotonic()
        if now_s - self._signs_s >= self._interval_s / 2:
            self._signs, self._signs_s = self._folder.signs.all(self._folder.nodes), now_s
        sign = self._signs.get(str(node))
        return None if sign is None else (self._state.last_heartbeats.get(node), sign)

    def _sign_now(self, node: _NodeDesc) -> tuple[object, str]:
        return self._state.last_heartbeats.get(node), self._folder.signs.of(node)


def _awaited(state: _RendezvousState, settings: RendezvousSettings) -> tuple[object, ...]:
    """Return the parts of a list that other nodes may be waiting for."""
    has_room = state.complete and len(state.participants) < settings.max_nodes
    return state.round, state.complete, state.closed, state.deadline, has_room


class Orderly(_DistributedRendezvousOpExecutor):
    """Applies torch's rules; only one node at a time changes the list."""

    def __init__(
        self,
        node: _NodeDesc,
        holder: ListOfNodes,
        settings: RendezvousSettings,
        folder: RendezvousFolder,
    ) -> None:
        super().__init__(node, holder, settings)
        self._list = holder
        self._last_sign_s = time.monotonic()
        self._folder = folder

    def run(
        self,
        state_handler: _Rule,
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """Apply the rule until it is satisfied."""
        if isinstance(state_handler, _RendezvousExitOp) and not self._takes_part():
            return  # only this node could have added itself
        self._list.is_joining = isinstance(state_handler, _RendezvousJoinOp)
        try:
            if self._list.state.last_heartbeats:  # find dead nodes before taking the lock
                self._look(state_handler, deadline)
            action = self._act(state_handler, deadline, update_deadline)
            while action is not _Action.FINISH:
                if action is _Action.REMOVE_FROM_REDUNDANCY_LIST and update_deadline is not None:
                    deadline = update_deadline(self._settings.timeout.join)
                action = self._look(state_handler, deadline)
                if action in _WAITS:
                    self._give_sign()
                    time.sleep(_LOOK_S)
                elif action is not _Action.FINISH:
                    action = self._act(state_handler, deadline, update_deadline)
        finally:
            self._list.is_joining = False

    def _record(self, *_: object, **__: object) -> None:
        """Do nothing, as in the handler; these events would be named while holding the lock."""

    def _takes_part(self) -> bool:
        return self._node in self._list.state.participants

    def _give_sign(self) -> None:
        """Give a sign of life at the keep-alive interval."""
        now_s = time.monotonic()
        if now_s - self._last_sign_s > self._settings.keep_alive_interval.total_seconds():
            self._last_sign_s = now_s
            self._folder.signs.give(self._node)

    def _look(self, rule: _Rule, deadline: float) -> _Action:
        """Evaluate the rule on this node's copy; change nothing."""
        self._list.only_turns = True
        try:
            self._list.sync()
        finally:
            self._list.only_turns = False
        return rule(_RendezvousContext(self._node, self._list.state, self._settings), deadline)

    def _act(
        self, rule: _Rule, deadline: float, update_deadline: Callable[[timedelta], float] | None
    ) -> _Action:
        """Apply the rule once, under the lock; return its action."""
        once = _Once(rule)
        with self._folder.locked():
            super().run(once, deadline, update_deadline)
        return once.action


class _Once:
    """Wraps a rule so that it is satisfied after at most one change."""

    def __init__(self, rule: _Rule) -> None:
        self._rule = rule
        self._is_asked = False
        self.action = _Action.FINISH

    def __call__(self, context: _RendezvousContext, deadline: float) -> _Action:
        if self._is_asked:
            return _Action.FINISH
        self._is_asked = True
        self.action = self._rule(context, deadline)
        return _Action.FINISH if self.action in _WAITS else self.action
