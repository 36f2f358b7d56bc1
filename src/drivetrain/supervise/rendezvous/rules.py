"""torchelastic's rules of rendezvous, kept in a folder without races.

torch lets every node change its own copy of the list and try to put it back; of many who come at
once one gets through and the others begin again, so that a thousand nodes work for each other's
bin. Here a change is made under the folder's lock: read, changed, written, once per node. Who only
waits looks at a few bytes, until somebody has changed what it waits for.
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

# The last call of a round: once enough nodes are there, how long others may still join.
#
# torch writes it down as a time of day, by the clock of whoever was the one too many to wait for,
# and holds it against the clock of whoever reads it. Here each node counts from when it first saw
# that time, by its own clock, and torch is shown one that is long past or far off.

_PAST, _FUTURE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


class LastCall:
    """`lasts_s`: how long one is."""

    def __init__(self, lasts_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lasts_s = lasts_s
        self._clock = clock
        self._written: datetime | None = None
        self._over_s = 0.0

    def as_seen(self, deadline: datetime | None) -> datetime | None:
        """What torch's rules are shown, of what is written or was shown before."""
        if deadline is None:
            self._written = None
            return None
        if deadline not in (_PAST, _FUTURE, self._written):
            self._written, self._over_s = deadline, self._clock() + self._lasts_s
        return _PAST if self._clock() >= self._over_s else _FUTURE

    def as_written(self, deadline: datetime | None) -> datetime | None:
        """What the other nodes are to see: a new one, or the one there was."""
        return self._written if deadline in (_PAST, _FUTURE) else deadline


_LOOK_S = 1.0
_WAITS = (_Action.SYNC, _Action.KEEP_ALIVE)
_Rule = Callable[[_RendezvousContext, float], _Action]


class ListOfNodes(_RendezvousStateHolder):
    """This node's copy of the list in the folder."""

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
        """Whether only changes are looked for that somebody waits for."""
        self.is_joining = False
        """Whether those who have died are left out; who has joined only cares for who waits."""

    @property
    def state(self) -> _RendezvousState:
        """As of the last look."""
        return self._state

    def mark_dirty(self) -> None:
        """The next sync() writes. Only under the folder's lock."""
        self._is_dirty = True

    def sync(self) -> bool | None:
        """Write what was changed here, or read what others have changed."""
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
        """Of a list that was just read, and then as often as signs of life are given."""
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
        """Whether a node has given no sign of life for too long, by this node's clock."""
        return self._alive.is_dead(node)

    def _sign(self, node: _NodeDesc) -> tuple[object, str] | None:
        """When it says to have come is part of it: who comes again is alive."""
        now_s = time.monotonic()
        if now_s - self._signs_s >= self._interval_s / 2:
            self._signs, self._signs_s = self._folder.signs.all(self._folder.nodes), now_s
        sign = self._signs.get(str(node))
        return None if sign is None else (self._state.last_heartbeats.get(node), sign)

    def _sign_now(self, node: _NodeDesc) -> tuple[object, str]:
        return self._state.last_heartbeats.get(node), self._folder.signs.of(node)


def _awaited(state: _RendezvousState, settings: RendezvousSettings) -> tuple[object, ...]:
    """Of a list, what may end somebody's waiting."""
    has_room = state.complete and len(state.participants) < settings.max_nodes
    return state.round, state.complete, state.closed, state.deadline, has_room


class Orderly(_DistributedRendezvousOpExecutor):
    """Carries out torch's rules: one node at a time changes the list."""

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
        """Until the rule is satisfied."""
        if isinstance(state_handler, _RendezvousExitOp) and not self._takes_part():
            return  # only this node itself could have entered it
        self._list.is_joining = isinstance(state_handler, _RendezvousJoinOp)
        try:
            if self._list.state.last_heartbeats:  # who has died is found out before others wait
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
        """Not torch's events, as in the handler; these would be named under the lock."""

    def _takes_part(self) -> bool:
        return self._node in self._list.state.participants

    def _give_sign(self) -> None:
        """Of life, once in a while; the list knows when this node came."""
        now_s = time.monotonic()
        if now_s - self._last_sign_s > self._settings.keep_alive_interval.total_seconds():
            self._last_sign_s = now_s
            self._folder.signs.give(self._node)

    def _look(self, rule: _Rule, deadline: float) -> _Action:
        """What the rule says, by what is known here; nothing is changed."""
        self._list.only_turns = True
        try:
            self._list.sync()
        finally:
            self._list.only_turns = False
        return rule(_RendezvousContext(self._node, self._list.state, self._settings), deadline)

    def _act(
        self, rule: _Rule, deadline: float, update_deadline: Callable[[timedelta], float] | None
    ) -> _Action:
        """What the rule says, done."""
        once = _Once(rule)
        with self._folder.locked():
            super().run(once, deadline, update_deadline)
        return once.action


class _Once:
    """A rule that is satisfied after one change, or none."""

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
