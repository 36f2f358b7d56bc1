"""pp: each rank has some of the model's layers (torch.distributed.pipelining)."""
