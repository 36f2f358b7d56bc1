"""Split everything the next step depends on into tensors and plain values, and restore it.

Tensors are named as in the user's own model, in every strategy: `model.<name>` and
`optimizer.<parameter>.<key>`. State that differs between ranks (random states, the position in a
data stream, the user's objects) is packed into one small tensor per rank.
"""

from __future__ import annotations

import io
import pickle
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.frozen import FrozenBase
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.core.errors import ConfigError, Problem, blame
from drivetrain.core.stateful import Stateful
from drivetrain.parallel.accelerator import Accelerator, accelerator_of

Values = dict[str, Any]


@dataclass
class TrainingState:
    """The state of a run, as the checkpointer sees it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    rank: int = 0
    common: Mapping[str, Stateful] = field(default_factory=dict)
    """Plain state that is the same on every rank: a scaler, the position in the run."""
    own: Mapping[str, Stateful] = field(default_factory=dict)
    """State that differs between ranks."""
    is_first_copy: bool = True
    """Whether this rank is the first of those that hold the same part of the model."""
    accelerator: Accelerator = field(default_factory=lambda: accelerator_of(torch.device("cpu")))
    """The device whose random state is saved."""
    base: FrozenBase | None = None
    """The frozen weights, if only trained weights are saved."""
    users: frozenset[str] = frozenset()
    """Names in `own` that the user passed: in another layout every rank gets rank 0's."""
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Averages, saved beside the weights under their own names (`ema.<parameter>`)."""

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the weights and buffers, by the user's names."""
        return {f"model.{name}": value for name, value in self._model_state().items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what this rank contributes to a weights-only checkpoint."""
        tensors = self.model_tensors()
        if not self.is_first_copy:
            # running statistics differ between copies; those of the first one are saved
            buffers = {f"model.{name}" for name, _ in self.model.named_buffers()}
            shared = {n for n, t in tensors.items() if n in buffers and not isinstance(t, DTensor)}
            tensors = {name: value for name, value in tensors.items() if name not in shared}
        return tensors

    def everything(self) -> tuple[dict[str, torch.Tensor], Values]:
        """Return this rank's tensors, and the values that are the same on every rank."""
        # the model first: it restores shards that an evaluation left gathered, and the optimizer
        # state belongs to the shards
        weights = self.weights()
        state, values = self._optimizer_state()
        groups = [] if self.optimizer is None else saved_groups(self.optimizer)
        own = {own_name(self.rank): pack(self._own())}
        tensors = {**weights, **state, **self.averages, **own}
        common = {name: thing.state_dict() for name, thing in self.common.items()}
        return tensors, {"optimizer": {"values": values, "groups": groups}, "common": common}

    def changes_in_forward(self) -> Callable[[str], bool]:
        """Return a test, by name, for tensors that may change before the next optimizer step.

        Untrained weights may change: a teacher may follow the student in the forward pass.
        """
        parameters = self.model.named_parameters()
        steady = {f"model.{name}" for name, p in parameters if p.requires_grad}
        steady |= self.averages.keys()
        return lambda name: name not in steady and not name.startswith("optimizer.")

    def load_targets(self) -> dict[str, torch.Tensor]:
        """Return the tensors in use, which are overwritten in place."""
        weights = self.model_tensors()
        state, _ = self._optimizer_state()
        return {**weights, **state, **self.averages}

    def restore(self, values: Values, own: Mapping[str, Any]) -> None:
        """Restore everything that is not a tensor; `own` may be incomplete.

        Without optimizer values, the current optimizer starts from scratch.
        """
        if self.optimizer is not None and "optimizer" in values:
            if values["optimizer"]["groups"] is not None:
                _restore_groups(self.optimizer, values["optimizer"]["groups"])
            by_name = self._parameters()
            for name, value in values["optimizer"]["values"].items():
                parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
                self.optimizer.state[by_name[parameter]][key] = value
        for name, thing in self.common.items():
            if name in values["common"]:
                thing.load_state_dict(values["common"][name])
        if "random" in own:
            _restore_random(own["random"], self.accelerator)
        for name, thing in self.own.items():
            if name in own:
                try:
                    thing.load_state_dict(own[name])
                except Exception as error:
                    blame(error, f"load_state_dict of {name} (stateful)")
                    raise

    def forget(self, names: list[str]) -> None:
        """Drop optimizer state that did not exist yet when the checkpoint was saved."""
        if self.optimizer is None:
            return
        by_name = self._parameters()
        for name in names:
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            state = self.optimizer.state.get(by_name[parameter], {})
            state.pop(key, None)
            if not state:
                self.optimizer.state.pop(by_name[parameter], None)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def _own(self) -> dict[str, Any]:
        return {
            "random": _random_state(self.accelerator),
            **{name: _state_of(thing, name) for name, thing in self.own.items()},
        }

    def _model_state(self) -> dict[str, torch.Tensor]:
        state = get_model_state_dict(self.model)
        return {n: v for n, v in state.items() if isinstance(v, torch.Tensor)}

    def _optimizer_state(self) -> tuple[dict[str, torch.Tensor], Values]:
        if self.optimizer is None:
            return {}, {}
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        tensors: dict[str, torch.Tensor] = {}
        values: Values = {}
        for parameter, entries in state.items():
            for key, value in entries.items():
                name = f"optimizer.{parameter}.{key}"
                if isinstance(value, torch.Tensor):
                    tensors[name] = value
                elif value is not None:
                    values[name] = plain(value, name)
        return tensors, values


def _state_of(thing: Stateful, name: str) -> dict[str, Any]:
    try:
        return thing.state_dict()
    except Exception as error:
        blame(error, f"state_dict of {name} (stateful)")
        raise


def own_name(rank: int) -> str:
    """Return the name of a rank's own tensor."""
    return f"rank.{rank:05d}"


def is_own(name: str) -> bool:
    """True if the name is that of a rank's own tensor."""
    return re.fullmatch(r"rank\.\d+", name) is not None


def pack(state: Mapping[str, Any]) -> torch.Tensor:
    """Serialize tensors and plain values to bytes."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    try:
        # fail now, not at a resume, if it cannot be loaded without running code
        torch.load(buffer, weights_only=True, map_location="meta")
    except pickle.UnpicklingError:
        raise _not_plain(state) from None
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> dict[str, Any]:
    """Undo `pack`; `weights_only` never runs code from the data."""
    buffer = io.BytesIO(packed.numpy().tobytes())
    try:
        # to the CPU: the device it was saved on may have another index here, or not exist
        state: dict[str, Any] = torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:  # torch and zip raise many types for invalid bytes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpoint(f"a rank's own state cannot be read ({reason})") from error
    return state


def _not_plain(state: Mapping[str, Any]) -> ConfigError:
    """Return an error that names the objects whose state needs pickle."""
    guilty = []
    for name, value in state.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True, map_location="meta")
        except pickle.UnpicklingError:
            guilty.append(name)
    return ConfigError(
        [
            Problem(
                f"state_dict of {name}",
                "cannot be saved without pickle",
                "return only numbers, strings, lists, dicts and tensors",
                has_value=False,
            )
            for name in guilty
        ]
    )


def saved_groups(optimizer: torch.optim.Optimizer) -> list[Values]:
    """Return the parameter groups' settings, as stored in a checkpoint."""
    return [
        {k: plain(v, f"param_groups.{k}") for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _restore_groups(optimizer: torch.optim.Optimizer, saved: list[Values]) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise ConfigError(
            [
                Problem(
                    "optimizer",
                    f"has {len(optimizer.param_groups)} parameter groups, the checkpoint has "
                    f"{len(saved)}",
                    "create the same optimizer as in the saved run",
                    type(optimizer).__name__,
                )
            ]
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def plain(value: Any, name: str) -> Any:
    """Return the value in a form that JSON can hold, or raise ConfigError."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, name) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, name) for key, item in value.items()}
    raise ConfigError(
        [
            Problem(
                name,
                "cannot be saved without pickle",
                "keep only numbers, strings, lists, dicts and tensors in an optimizer's state",
                type(value).__name__,
            )
        ]
    )


def _random_state(accelerator: Accelerator) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
    }
    device = accelerator.random_state()
    if device is not None:
        state[accelerator.device.type] = device
    numpy = _numpy()
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.copy()), position, has_gauss, cached]
    return state


def _restore_random(state: Mapping[str, Any], accelerator: Accelerator) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if accelerator.device.type in state:
        accelerator.set_random_state(state[accelerator.device.type])
    numpy = _numpy()
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy(), position, has_gauss, cached))


def _numpy() -> Any:
    """Return NumPy if the process has imported it."""
    import sys

    return sys.modules.get("numpy")


@dataclass
class Value:
    """A Stateful made from a getter and a setter."""

    get: Callable[[], Any]
    set: Callable[[Any], None]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set(state["value"])
