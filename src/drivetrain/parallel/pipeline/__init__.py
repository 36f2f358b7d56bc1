"""pp: ranks that each have some of a model's layers (torch.distributed.pipelining)."""
