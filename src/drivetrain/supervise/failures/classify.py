"""Why an attempt ended, from how its ranks did. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.record.session import Phase, Progress
from drivetrain.supervise.failures.failure import RankFailure, root_cause
from drivetrain.supervise.policy import PREEMPTED_CODE, STALE_CODE, End, Kind


def classify(
    failures: Sequence[RankFailure],
    pages: Sequence[Progress | None],
    *,
    trains: bool,
    has_peers: bool,
) -> End:
    """`pages`: what the node's ranks last wrote; `has_peers`: whether there are other nodes."""
    cause = root_cause(failures)
    kind = _kind(failures, pages, has_peers=has_peers)
    code = STALE_CODE if kind is Kind.STALE else cause.process_exit_code
    was_killed = cause.killed_by is not None
    return End(kind, last_step(pages), code, trains, by_signal=was_killed, fault=cause.fault)


def last_step(pages: Sequence[Progress | None]) -> int:
    """The furthest that a rank has come; 0 when none has finished a step."""
    return max((page.step for page in pages if page is not None), default=0)


def _kind(
    failures: Sequence[RankFailure], pages: Sequence[Progress | None], *, has_peers: bool
) -> Kind:
    codes = {failure.exit_code for failure in failures}
    if codes == {PREEMPTED_CODE}:
        return Kind.PREEMPTED
    if STALE_CODE in codes:
        return Kind.STALE
    if has_peers and root_cause(failures).is_collateral:
        return Kind.PEER
    if all(page is None or page.phase is Phase.STARTING for page in pages):
        return Kind.START_UP
    return Kind.FAILED
