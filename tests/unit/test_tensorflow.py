"""What can be said of TensorFlow runs without TensorFlow: addresses, TF_CONFIG, what is refused."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec

import pytest

from drivetrain import TensorFlowDistributedTrainer
from drivetrain.cluster.environments import Identity, detect
from drivetrain.compat.tensorflow import checked_servers, own_address, tf_config
from drivetrain.core.errors import ConfigError, EnvironmentProblem
from drivetrain.launch.request import read_command

RANK_1_OF_2 = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_tf_config_from_our_identity() -> None:
    identity = detect(RANK_1_OF_2)
    addresses = ["127.0.0.1:4001", own_address(identity)]
    found = json.loads(json.dumps(tf_config(addresses, identity.rank)))
    assert found["cluster"]["worker"] == addresses
    assert found["task"] == {"type": "worker", "index": 1}


def test_tf_config_with_parameter_servers() -> None:
    found = [tf_config(["a", "b", "c", "d"], rank, num_servers=1) for rank in range(4)]
    assert found[0]["cluster"] == {"chief": ["a"], "ps": ["b"], "worker": ["c", "d"]}
    tasks = [tuple(each["task"].values()) for each in found]
    assert tasks == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]


def test_too_few_ranks_for_the_parameter_servers_asked_for() -> None:
    assert checked_servers(2, world_size=4, save_every="epoch") == 2
    with pytest.raises(ConfigError, match="3 ranks are too few"):
        checked_servers(2, world_size=3, save_every="epoch")
    with pytest.raises(ConfigError, match="no common step to save"):
        checked_servers(1, world_size=4, save_every=10)


def test_a_workers_address_is_one_that_can_be_taken() -> None:
    identity = Identity("torchrun", 0, 0, 2, 2, 0, "127.0.0.1", 29500)
    host, port = own_address(identity).split(":")
    assert host == "127.0.0.1"
    with socket.socket() as server:
        server.bind((host, int(port)))


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="it is installed")
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # restored afterwards: the trainer sets it
    with pytest.raises(EnvironmentProblem, match=r"pip install .*\[tensorflow\]'"):
        TensorFlowDistributedTrainer(lambda: None)


def test_a_model_that_is_made_already_is_refused() -> None:
    class Model:
        def __call__(self) -> None: ...

        def fit(self) -> None: ...

    with pytest.raises(ConfigError, match="in the strategy's scope"):
        TensorFlowDistributedTrainer(Model())
    with pytest.raises(ConfigError, match="save_every"):
        TensorFlowDistributedTrainer(lambda: None, save_every=0)


def test_the_backend_starts_plain_ranks() -> None:
    command = read_command(["--backend", "tensorflow", "--nproc-per-node", "2", "train.py", "x"])
    assert command.script == "train.py"
    assert command.script_args == ("x",)
