"""Each collective as torch's own call on this rank's tensors, with the expected result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.collectives.patterns import DTYPES, Pattern, count_wrong, pieces, write

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
Values = Callable[[Pattern], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Member:
    """This rank in its group."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    index: int
    """This rank's index in the group."""
    device: torch.device

    @property
    def number(self) -> int:
        return len(self.ranks)

    @property
    def is_root(self) -> bool:
        """True on the first rank of a group, the root of rooted operations."""
        return self.index == 0

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        return torch.zeros(count, dtype=DTYPES[dtype], device=self.device)


@dataclass(frozen=True)
class Prepared:
    """A call, its inputs, and its expected outputs."""

    call: Callable[[], Any]
    sent: tuple[tuple[torch.Tensor, Values], ...] = ()
    received: tuple[tuple[torch.Tensor, Values], ...] = ()
    """In place, these share memory with `sent`; empty on ranks that receive nothing."""

    def fill(self, pattern: Pattern) -> None:
        """Fill outputs first: in place, an input is a part of them."""
        for tensor, _ in self.received:
            tensor.fill_(pattern.poison)
        for tensor, values in self.sent:
            write(tensor, values(pattern))

    def wrong(self, pattern: Pattern) -> int:
        return sum(count_wrong(tensor, values(pattern)) for tensor, values in self.received)


@dataclass(frozen=True)
class Form:
    """One row's form: `count` is that of nccl-tests, per part if an operation has parts."""

    count: int
    dtype: str
    redop: str
    is_in_place: bool


def prepare(operation: str, member: Member, form: Form) -> Prepared | None:
    """Return the prepared call, or None if torch's call has no such form."""
    return _KINDS[operation](member, form)


# Values: the pattern at the positions that a tensor represents.


def _own(rank: int, count: int, offset: int = 0) -> Values:
    """Return `count` elements of a rank's tensor, starting at `offset`."""
    return lambda pattern: (pattern.of_rank(rank, index + offset) for index in pieces(count))


def _reduced(count: int, offset: int = 0) -> Values:
    return lambda pattern: (pattern.reduced(index + offset) for index in pieces(count))


def _parts(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(whole.split(count))


# Operations on one tensor: torch only has them in place.


def _all_reduce(member: Member, form: Form) -> Prepared | None:
    if not form.is_in_place:
        return None
    tensor = member.empty(form.count, form.dtype)
    return Prepared(
        partial(dist.all_reduce, tensor, op=_REDUCE_OPS[form.redop], group=member.group),
        ((tensor, _own(member.index, form.count)),),
        ((tensor, _reduced(form.count)),),
    )


def _reduce(member: Member, form: Form) -> Prepared | None:
    if not form.is_in_place:
        return None
    tensor = member.empty(form.count, form.dtype)
    op = _REDUCE_OPS[form.redop]
    received = ((tensor, _reduced(form.count)),) if member.is_root else ()
    return Prepared(
        partial(dist.reduce, tensor, member.ranks[0], op=op, group=member.group),
        ((tensor, _own(member.index, form.count)),),
        received,
    )


def _broadcast(member: Member, form: Form) -> Prepared | None:
    if not form.is_in_place:
        return None
    tensor = member.empty(form.count, form.dtype)
    sent = ((tensor, _own(0, form.count)),) if member.is_root else ()
    return Prepared(
        partial(dist.broadcast, tensor, member.ranks[0], group=member.group),
        sent,
        ((tensor, _own(0, form.count)),),
    )


# Operations on a part and the whole: in place, the part is this rank's slice of the whole.


def _part_and_whole(member: Member, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    whole = member.empty(form.count * member.number, form.dtype)
    if form.is_in_place:
        return _parts(whole, form.count)[member.index], whole
    return member.empty(form.count, form.dtype), whole


def _all_parts(whole: torch.Tensor, count: int) -> tuple[Any, ...]:
    """Return each part with the values of the rank it comes from."""
    return tuple((part, _own(r, count)) for r, part in enumerate(_parts(whole, count)))


def _all_gather(member: Member, form: Form) -> Prepared:
    part, whole = _part_and_whole(member, form)
    # torch is renaming it
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return Prepared(
        partial(gather, whole, part, group=member.group),
        ((part, _own(member.index, form.count)),),
        _all_parts(whole, form.count),
    )


def _reduce_scatter(member: Member, form: Form) -> Prepared:
    part, whole = _part_and_whole(member, form)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return Prepared(
        partial(scatter, part, whole, op=_REDUCE_OPS[form.redop], group=member.group),
        ((whole, _own(member.index, form.count * member.number)),),
        ((part, _reduced(form.count, member.index * form.count)),),
    )


def _gather(member: Member, form: Form) -> Prepared:
    if not member.is_root:
        part = member.empty(form.count, form.dtype)
        call = partial(dist.gather, part, None, member.ranks[0], group=member.group)
        return Prepared(call, ((part, _own(member.index, form.count)),))
    part, whole = _part_and_whole(member, form)
    parts = _parts(whole, form.count)
    return Prepared(
        partial(dist.gather, part, parts, member.ranks[0], group=member.group),
        ((part, _own(0, form.count)),),
        _all_parts(whole, form.count),
    )


def _scatter(member: Member, form: Form) -> Prepared:
    if not member.is_root:
        part = member.empty(form.count, form.dtype)
        call = partial(dist.scatter, part, None, member.ranks[0], group=member.group)
        return Prepared(call, (), ((part, _own(0, form.count, member.index * form.count)),))
    part, whole = _part_and_whole(member, form)
    parts = _parts(whole, form.count)
    return Prepared(
        partial(dist.scatter, part, parts, member.ranks[0], group=member.group),
        ((whole, _own(0, form.count * member.number)),),
        ((part, _own(0, form.count)),),
    )


def _all_to_all(member: Member, form: Form) -> Prepared | None:
    if form.is_in_place:  # nccl-tests has no such form either
        return None
    size, mine = form.count * member.number, member.index * form.count
    sent, received = member.empty(size, form.dtype), member.empty(size, form.dtype)
    from_each = tuple(
        (part, _own(rank, form.count, mine))
        for rank, part in enumerate(_parts(received, form.count))
    )
    return Prepared(
        partial(dist.all_to_all_single, received, sent, group=member.group),
        ((sent, _own(member.index, size)),),
        from_each,
    )


# Point to point, and the barrier.


def _send_recv(member: Member, form: Form) -> Prepared | None:
    """Send to the next rank and receive from the previous one at once, like nccl-tests."""
    if form.is_in_place:
        return None
    after, before = (member.index + 1) % member.number, (member.index - 1) % member.number
    sent, received = member.empty(form.count, form.dtype), member.empty(form.count, form.dtype)
    both = [
        dist.P2POp(dist.isend, sent, member.ranks[after], member.group),
        dist.P2POp(dist.irecv, received, member.ranks[before], member.group),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Prepared(
        call,
        ((sent, _own(member.index, form.count)),),
        ((received, _own(before, form.count)),),
    )


def _barrier(member: Member, form: Form) -> Prepared | None:
    return None if form.is_in_place else Prepared(partial(dist.barrier, group=member.group))


_KINDS: dict[str, Callable[[Member, Form], Prepared | None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}
