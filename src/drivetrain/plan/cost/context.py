"""A rank's parts under context parallelism: 1/cp of the sequence, but for what is of the whole.

Each block gathers the keys and values of the whole sequence, forward and back, and in backward has
their gradients too; a query attends to all keys. The model's output is put together on every rank,
so the loss is of the whole sequence. Keys and values are taken to be as wide as the hidden state,
which is too much for grouped-query attention.
"""

from __future__ import annotations

from dataclasses import replace

from drivetrain.plan.candidate import Candidate
from drivetrain.plan.profile.model import ModelProfile
from drivetrain.plan.profile.numbers import part_numbers
from drivetrain.strategies.cost import PartNumbers, WorkNumbers


def rank_parts(profile: ModelProfile, candidate: Candidate) -> tuple[PartNumbers, ...]:
    """Every traced part, at the size a rank has."""
    batch, tp, cp = candidate.micro_batch_size, candidate.layout.tp, candidate.layout.cp
    numbers = part_numbers(profile, batch, 1.0 / cp, tp)
    if cp == 1:
        return numbers
    hidden = profile.hand_over_bytes.one(batch, 1.0, tp)
    whole = part_numbers(profile, batch, 1.0, tp)
    both = zip(numbers[1:-1], whole[1:-1], strict=True)
    blocks = [_block(part, all_of_it, cp, 2 * hidden) for part, all_of_it in both]
    return (numbers[0], *blocks, _back(whole[-1], numbers[-1].saved))


def _back(part: PartNumbers, own: float) -> PartNumbers:
    """The outputs' parts lie beside the whole while it is put together, and while it is cut again.

    `own`: what the loss of a part would save, which is about as much as a part of the output.
    """
    return replace(part, forward=_more(part.forward, own), backward=_more(part.backward, own))


def _block(part: PartNumbers, whole: PartNumbers, cp: int, gathered: float) -> PartNumbers:
    """`gathered`: bytes of keys and values of the whole sequence."""
    forward = _more(part.forward, gathered)
    backward = _more(part.backward, 2 * gathered)
    return replace(
        part,
        forward=replace(forward, attention_flops=whole.forward.attention_flops / cp),
        backward=replace(backward, attention_flops=whole.backward.attention_flops / cp),
    )


def _more(work: WorkNumbers, num_bytes: float) -> WorkNumbers:
    """With so many bytes on top at the worst moment."""
    return replace(
        work,
        peak=work.peak + num_bytes,
        peak_with_gradients=work.peak_with_gradients + num_bytes,
    )
