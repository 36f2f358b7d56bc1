"""Ledger: where every second of a run went, across all its attempts.

From the first command to the last sign of life each second has one class:

    productive      forward, backward, optimizer, and the loop around them
    evaluation      going through the validation data
    data_wait       a step had no batch yet
    communication   a rank had nothing left to do but wait for others
    checkpoint      a step, or the end of the run, waited for a save
    start_up        from the command to the first step; and from the last step to the end
    compile         torch.compile's share of the steps it worked in
    recovery        from a failure to the next step
    redone          work that was lost, and done again by a later attempt
    stalled         nothing moved, and nobody had noticed yet
    preempted       stopped from outside, and not yet started again
    idle            nobody was running it

Ranks go through a step differently: one waits for data, the others wait for it. A class's seconds
are the mean over the ranks. Everything here is pure: from what was written down to the account.
"""

from drivetrain.record.ledger.make import ledger_of, make_ledger
from drivetrain.record.ledger.values import CLASSES, Ledger, Segment

__all__ = ["CLASSES", "Ledger", "Segment", "ledger_of", "make_ledger"]
