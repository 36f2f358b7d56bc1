"""One package per strategy, with everything that is specific to it.

`<name>/__init__.py` defines its traits and settings and does not import torch; the modules that the
traits refer to do.
"""

BUILT_IN = {
    "ddp": "drivetrain.strategies.ddp:TRAITS",
    "fsdp": "drivetrain.strategies.fsdp:TRAITS",
    "local_sgd": "drivetrain.strategies.local_sgd:TRAITS",
    "parameter_server": "drivetrain.strategies.parameter_server:TRAITS",
    "deepspeed": "drivetrain.strategies.deepspeed:TRAITS",
    "horovod": "drivetrain.strategies.horovod:TRAITS",
}
"""The first is the default. Other packages register strategies as entry points of the group
`drivetrain.strategies`."""
