"""The attempt state machine of one node: one event, one transition.

    JOINING ──joined──▶ RUNNING ──all ranks ended──▶ FINISHING ──others ended too──▶ OVER
       ▲                  │  │
       │                  │  └─asked to stop──▶ DRAINING ──ranks ended, or out of time──▶ OVER
       └──start again─────┴─failed, stalled, resized, peer gone──stop──▶ OVER

Nothing here starts or ends a process: a transition returns the actions to take, and the agent takes
them. Time and facts are passed in as values, so a test can step through a whole run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from drivetrain.supervise.policy import PREEMPTED_CODE, Budgets, Decision, End, EndKind, decide

SAME_REQUEST_S = 1.0
"""Within this time a signal repeats a request: it was sent to every process, or forwarded."""
_BY_THE_SIGNAL = frozenset({128 + signal.SIGTERM, 128 + signal.SIGUSR1})


class MachineState(Enum):
    """Where a node's part of the run is."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHING = "finishing"
    DRAINING = "draining"
    OVER = "over"


class Action(Enum):
    """What the agent must do next, in order."""

    START = "start workers"
    DUMP_STACKS = "write down every rank's stack"
    KILL = "end every worker at once"
    ASK = "ask the workers to save and stop"
    JOIN = "join the other nodes"
    LEAVE = "tell the other nodes that it is over"


@dataclass
class Machine:
    """One node's state and history."""

    budgets: Budgets
    clock: Callable[[], float]
    grace_s: float = 30.0
    state: MachineState = MachineState.JOINING
    history: list[End] = field(default_factory=list)
    exit_code: int = 0
    why: str = ""
    """The reason for the last decision."""
    asked_by: str = ""
    asked_s: float = 0.0
    deadline_s: float = 0.0

    def joined(self) -> list[Action]:
        """All nodes have joined, and ranks are assigned."""
        if self.state is MachineState.DRAINING:  # asked to stop while joining
            return self._over(PREEMPTED_CODE)
        self._expect(MachineState.JOINING)
        self.state = MachineState.RUNNING
        return [Action.START]

    def could_not_join(self) -> None:
        """The rendezvous failed: exit so that this node can be restarted."""
        self.state, self.exit_code = MachineState.OVER, PREEMPTED_CODE

    def came_too_late(self, *, has_finished: bool) -> None:
        """The other nodes have closed the group: they have finished or abandoned the run."""
        self.state = MachineState.OVER
        self.exit_code = 0 if has_finished else self.exit_code or 1

    def ended(self, end: End) -> list[Action]:
        """The node's ranks have ended, or must be killed, for this reason."""
        if self.state is MachineState.DRAINING:
            self.history.append(end)
            # a rank that was only starting, or already ending, does not handle the signal
            ended_by_it = end.trains and end.exit_code in _BY_THE_SIGNAL
            stopped_well = end.kind in (EndKind.PREEMPTED, EndKind.FINISHED) or ended_by_it
            code = 0 if end.kind is EndKind.FINISHED else PREEMPTED_CODE if stopped_well else None
            return [Action.KILL, *self._over(end.exit_code if code is None else code)]
        if end.kind is EndKind.FINISHED:
            self._expect(MachineState.RUNNING)
            self.state = MachineState.FINISHING
            return []
        decision = decide(end, self.history, self.budgets)
        self.history.append(end)
        stacks = [Action.DUMP_STACKS] if end.kind is EndKind.STALLED else []
        return [*stacks, Action.KILL, *self._follow(decision, end)]

    def others_ended(self) -> list[Action]:
        """Every node's ranks have finished."""
        self._expect(MachineState.FINISHING)
        return self._over(0)

    def rejoin(self) -> list[Action]:
        """Another node failed after this one had finished: rejoin, so that all finish together."""
        self._expect(MachineState.FINISHING)
        self.history.append(End(EndKind.PEER, self._last_step()))
        self.state = MachineState.JOINING
        return [Action.KILL, Action.JOIN]

    def asked(self, by: str, since_s: float | None = None) -> list[Action]:
        """A scheduler or a user asks the run to stop; a second request kills it at once.

        `since_s`: when the first request came, if that was before this machine was told.
        """
        if self.state is MachineState.DRAINING:
            if self.clock() - self.asked_s < SAME_REQUEST_S:
                return []
            self.why = f"a second {by} ended it at once"
            return [Action.KILL, *self._over(PREEMPTED_CODE)]
        if self.state is MachineState.OVER:
            return []
        self.asked_s = self.clock() if since_s is None else since_s
        was_running = self.state is MachineState.RUNNING
        self.asked_by, self.state = by, MachineState.DRAINING
        self.deadline_s = self.clock() + self.grace_s
        return [Action.ASK] if was_running else self._over(PREEMPTED_CODE)

    def tick(self) -> list[Action]:
        """Time has passed."""
        if self.state is MachineState.DRAINING and self.clock() > self.deadline_s:
            self.why = f"the ranks did not stop within {self.grace_s:g} s and were killed"
            return [Action.KILL, *self._over(PREEMPTED_CODE)]
        return []

    def _follow(self, decision: Decision, end: End) -> list[Action]:
        self.why = decision.why
        if decision.restart:
            self.state = MachineState.JOINING
            return [Action.JOIN]
        return self._over(end.exit_code)

    def _over(self, exit_code: int) -> list[Action]:
        self.state, self.exit_code = MachineState.OVER, exit_code
        return [Action.LEAVE]

    def _last_step(self) -> int:
        return self.history[-1].step if self.history else 0

    def _expect(self, *states: MachineState) -> None:
        if self.state not in states:
            raise RuntimeError(f"the state is {self.state}; expected one of {states}")
