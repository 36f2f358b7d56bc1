"""Exercise buckets: average gradients while backward still runs.

Guidelines: guidelines.md, part 1. Check: drivetrain learn check buckets
"""

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401
from torch import nn


class BucketedDDP:
    """Averages a model's gradients over all ranks, bucket by bucket.

    Each rank does, in every step:

        loss.backward()    # your hooks start the reductions
        ddp.finish()       # every parameter's .grad now has the mean
        optimizer.step()

    dist.all_reduce(tensor, async_op=True) returns a request at once; request.wait() waits for it.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        """Split the parameters into buckets of at most `bucket_bytes`, and register hooks.

        A parameter that is larger than that gets its own bucket. Backward computes the
        gradients of the last layers first.
        """
        # TODO 1: the buckets, in the order in which backward fills them.
        # TODO 2: parameter.register_post_accumulate_grad_hook(function): backward calls
        #         function(parameter) as soon as parameter.grad is complete.
        raise NotImplementedError("TODO 1 and 2 of BucketedDDP")

    def finish(self) -> None:
        """Return when every .grad is the mean over all ranks.

        A parameter that was not used on this rank has no gradient (None), but may have been used
        on another rank. On this rank its gradient counts as zero.
        """
        # TODO 3: start what backward has not started; wait; divide; write into .grad.
        raise NotImplementedError("TODO 3 of BucketedDDP")
