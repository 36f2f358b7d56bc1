"""One folder per strategy: everything that is said about it.

`<name>/__init__.py` has its traits and its settings and loads no torch; what they refer to does.
"""

BUILT_IN = {
    "ddp": "drivetrain.strategies.ddp:TRAITS",
    "fsdp": "drivetrain.strategies.fsdp:TRAITS",
    "local_sgd": "drivetrain.strategies.local_sgd:TRAITS",
    "parameter_server": "drivetrain.strategies.parameter_server:TRAITS",
    "deepspeed": "drivetrain.strategies.deepspeed:TRAITS",
    "horovod": "drivetrain.strategies.horovod:TRAITS",
}
"""The first is the default. Other packages add theirs by the entry point of this name."""
