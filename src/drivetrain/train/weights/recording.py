"""Build a model without its weights, and create any of them later, bit for bit.

While the user's function runs under a `Recording`, large tensors are torch's fake tensors: they
have a shape and report that they are on the CPU, but hold no data. The operations that fill them
are recorded and can be replayed for one tensor at a time. So it does not matter how a model
initialises itself (`reset_parameters`, `_init_weights`, `apply`, in `__init__`), or which tensors
are tied, copied or computed from others. Small tensors are created at once. (The idea is from
torchdistx's deferred initialisation.)

    model, weights = Recording().build(make_model)    # model is on the meta device
    weights.part("embed.weight", ())                  # as make_model would have created it

Torch's own meta device is not enough, because code that checks `is_meta` behaves differently there:
`nn.init.trunc_normal_` silently leaves the weight unchanged.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from drivetrain.plan.profile.fake_tensor_patches import moving_modules

SMALL = 4096
"""Tensors of up to this many elements are created at once: tables that `__init__` reads, norms."""

_LONG_S = 60.0
_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)  # noqa: SLF001 - .item() calls it
_OVERWRITES = frozenset(
    f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy", "random")
)
"""Operations that overwrite their first argument without reading it."""
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


Box = tuple[slice, ...]
"""A part of a tensor; () is the whole tensor."""
Part = Callable[[str, Box], torch.Tensor]
Origin = TypeVar("Origin")


class NotRecordable(Exception):
    """While being built, the model does something that cannot be replayed."""


@dataclass(frozen=True)
class View:
    """A tensor without data: a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the same view of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass
class _Given:
    """A real tensor that an operation reads; copied only if something writes to it later."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class _Operation:
    """One call that created tensors or wrote to some."""

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[View | None, ...]
    """Its returned tensors that have a new storage."""
    overwritten: int | None
    """Storage that it fills without reading it."""
    draw: torch.Tensor | int | None
    """Generator state that its random values are drawn from, or a seed."""

    def inputs(self) -> Iterator[View]:
        """Yield the tensors whose values it needs."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, View) and leaf.storage != self.overwritten:
                yield leaf


class _History:
    """For each storage: its size and the operations that created it or wrote to it."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self.operations: list[list[_Operation]] = []

    def value(self, view: View) -> torch.Tensor:
        """Replay only the operations that led to a tensor's current contents."""
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for operation in self._needed(view.storage):
                self._replay(operation, storages)
            return self._real(view, storages)

    def _needed(self, storage: int) -> list[_Operation]:
        needed: dict[int, _Operation] = {}
        looked_at: set[tuple[int, float]] = set()
        ahead: list[tuple[int, float]] = [(storage, math.inf)]
        while ahead:
            storage, before = ahead.pop()
            if (storage, before) in looked_at:
                continue
            looked_at.add((storage, before))
            for operation in reversed(self.operations[storage]):
                if operation.number >= before:
                    continue
                if operation.number not in needed:
                    needed[operation.number] = operation
                    ahead += [(view.storage, operation.number) for view in operation.inputs()]
                if operation.overwritten == storage:
                    break
        return [needed[number] for number in sorted(needed)]

    def _replay(self, operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return self._real(leaf, storages)
            return leaf.tensor if isinstance(leaf, _Given) else leaf

        args, kwargs = tree_map(real, (operation.args, dict(operation.kwargs)))
        with _drawing(operation.draw, kwargs):
            made = operation.func(*args, **kwargs)
        for tensor, view in zip(tree_leaves(made), operation.made, strict=True):
            if view is not None:
                storages[view.storage] = self._laid_out(tensor, view)

    def _real(self, view: View, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if view.storage not in storages:
            storages[view.storage] = torch.UntypedStorage(self.num_bytes[view.storage])
        return view.on(storages[view.storage])

    def _laid_out(self, tensor: torch.Tensor, view: View) -> torch.UntypedStorage:
        """Return the tensor's storage with the recorded layout; kernels may use other strides."""
        size = self.num_bytes[view.storage]
        laid = (tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        if laid == (view.stride, view.offset, size):
            return tensor.untyped_storage()
        storage = torch.UntypedStorage(size, device=tensor.device)
        view.on(storage).copy_(tensor)
        return storage


@contextmanager
def _drawing(draw: torch.Tensor | int | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Context that draws from the recorded state or seed and keeps the process's generator."""
    if draw is None:
        yield
        return
    own = kwargs.get("generator")
    stream = torch.default_generator if own is None else torch.Generator()
    before = stream.get_state()
    if isinstance(draw, int):
        stream.manual_seed(draw)
    else:
        stream.set_state(draw)
    if own is not None:
        kwargs["generator"] = stream
    try:
        yield
    finally:
        stream.set_state(before)


class Recording(TorchDispatchMode):
    """Dispatch mode that is active while a model is built.

    Without `seed_of`, the process's random stream is used as usual: values are drawn and dropped,
    and the state they were drawn from is kept. So the weights are those of the same script without
    a recording, and the stream ends in the same state. With `seed_of`, the n-th draw has the seed
    `seed_of(n)`, and values that are not needed are never drawn.
    """

    def __init__(self, seed_of: Callable[[int], int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed_of = seed_of
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._history = _History()
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []
        self._given: dict[int, list[_Given]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._scratch = torch.UntypedStorage(0)
        self._num_operations = 0
        self._num_draws = 0
        self.drawing_s = 0.0
        """Seconds spent on values that were dropped."""
        self.when_long: Callable[[], None] | None = None
        """Called once when `drawing_s` exceeds a minute."""

    def build(self, make_model: Callable[[], nn.Module]) -> tuple[nn.Module, RecordedWeights]:
        """Return the model on the meta device, and its weights."""
        with warnings.catch_warnings(), moving_modules(), self:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            model = make_model()
        return model, self._take(model)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record operations on large tensors; execute all others."""
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            made = self._made_anew(func, args, kwargs) if not tensors else None
            return self._do(func, args, kwargs) if made is None else made
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor):
                raise NotRecordable(f"{func} on a {type(tensor).__name__}")
        written = _written(func, args, kwargs)
        if func in _READS or any(not isinstance(tensor, FakeTensor) for tensor in written):
            return self._do(func, *self._with_values(args, kwargs))
        try:
            return self._record(func, args, kwargs)
        except _NEEDS_VALUES as error:
            if written:
                raise NotRecordable(f"{func} needs values, and writes to them") from error
            return self._do(func, *self._with_values(args, kwargs))

    def _take(self, model: nn.Module) -> RecordedWeights:
        """Return the origin of each parameter and buffer; the model is left on the meta device."""
        origins = without_values(model, self._origin, self._value_of)
        weights = RecordedWeights(self._history, origins, self._finished(origins))
        self._check_nothing_left()
        return weights

    def _made_anew(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the creation of a large tensor on the CPU; return None for other calls."""
        is_call = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"  # noqa: SLF001
        device = torch.device(kwargs.get("device") or "cpu")
        if not is_call or device.type != "cpu" or not _returns_tensor(func):
            return None
        with self._fake:
            made = func(*args, **{**kwargs, "generator": None} if "generator" in kwargs else kwargs)
        if made.numel() <= SMALL:
            return None
        return self._record(func, args, kwargs)

    def _do(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the call."""
        for tensor in _written(func, args, kwargs):
            for given in self._given.pop(_key(tensor), []):
                given.tensor = given.tensor.clone()
        is_drawn = _is_random(func) and kwargs.get("generator") is None
        if is_drawn and self._seed_of is not None:
            with _drawing(self._next_seed(), kwargs):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        referred = tree_map_only(torch.Tensor, self._refer, (args, kwargs))
        with self._fake:
            if "generator" in kwargs:
                made = func(*args, **{**kwargs, "generator": None})
            else:
                made = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        new = tuple(self._number_if_new(leaf) for leaf in tree_leaves(made))
        if not written and all(view is None for view in new):
            return made  # another view of the same storage
        draw = self._draw(func, args, kwargs) if _is_random(func) else None
        overwritten = None
        if written and func._schema.name in _OVERWRITES and _is_all(written[0]):  # noqa: SLF001
            overwritten = self._refer(written[0]).storage
        kept_args, kept_kwargs = referred
        number = self._num_operations
        operation = _Operation(number, func, kept_args, kept_kwargs, new, overwritten, draw)
        self._num_operations += 1
        self._note(operation)
        storages = {self._refer(tensor).storage for tensor in written}
        for storage in storages | {view.storage for view in new if view is not None}:
            self._history.operations[storage].append(operation)
        return made

    def _draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | int | None:
        """Return the source of the random values; without seeds, advance the generator."""
        own = kwargs.get("generator")
        if own is None and self._seed_of is not None:
            return self._next_seed()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stream = torch.default_generator if own is None else own
        if stream.device.type != "cpu" or any(t.device.type != "cpu" for t in tensors):
            raise NotRecordable(f"{func} draws on a device")
        state: torch.Tensor = stream.get_state()
        began_s = time.perf_counter()
        if len(tensors) == 1 and tensors[0] is args[0] and _written(func, args, kwargs):
            func(self._scratch_like(tensors[0]), *args[1:], **kwargs)
        else:
            args, kwargs = self._with_values(args, kwargs)
            func(*args, **kwargs)
        self.drawing_s += time.perf_counter() - began_s
        if self.when_long is not None and self.drawing_s > _LONG_S:
            self.when_long()
            self.when_long = None
        return state

    def _scratch_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a scratch tensor to draw into; one storage serves all, as large as the largest."""
        needed = tensor.untyped_storage().nbytes()
        if self._scratch.nbytes() < needed:
            self._scratch = torch.UntypedStorage(needed)
        return self._window(tensor).on(self._scratch)

    def _next_seed(self) -> int:
        self._num_draws += 1
        return self._seed_of(self._num_draws) if self._seed_of is not None else 0

    def _with_values(self, args: Any, kwargs: Any) -> Any:
        def real(tensor: FakeTensor) -> torch.Tensor:
            return self._history.value(self._refer(tensor))

        return tree_map_only(FakeTensor, real, (args, kwargs))

    def _refer(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, FakeTensor):
            return self._window(tensor)
        given = _Given(tensor.detach())
        self._given.setdefault(_key(tensor), []).append(given)
        return given

    def _window(self, tensor: torch.Tensor) -> View:
        number = self._numbers.get(_key(tensor))
        if number is None:
            raise NotRecordable(f"a tensor of shape {tuple(tensor.shape)} came from elsewhere")
        shape = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return View(number, tensor.dtype, *shape)

    def _number_if_new(self, leaf: Any) -> View | None:
        if not isinstance(leaf, FakeTensor) or _key(leaf) in self._numbers:
            return None
        self._numbers[_key(leaf)] = len(self._held)
        self._held.append(leaf.untyped_storage())  # so that its address is not reused
        self._history.num_bytes.append(leaf.untyped_storage().nbytes())
        self._history.operations.append([])
        return self._window(leaf)

    def _note(self, operation: _Operation) -> None:
        """Add an operation to the digest of the recording."""

        def word(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return "generator"
            return sample(leaf.tensor) if isinstance(leaf, _Given) else leaf

        words = tree_map(word, (operation.args, dict(operation.kwargs)))
        self._digest.update(f"{operation.func} {words}".encode())
        draw = operation.draw
        state = draw.numpy().tobytes() if isinstance(draw, torch.Tensor) else repr(draw).encode()
        self._digest.update(state)

    def _finished(self, origins: Mapping[str, View | torch.Tensor]) -> str:
        self._scratch = torch.UntypedStorage(0)
        for name, origin in origins.items():
            word = sample(origin) if isinstance(origin, torch.Tensor) else origin
            self._digest.update(f"{name} {word}".encode())
        # different kinds of processors may draw values that differ in the last bit
        drawn = torch.empty(64).normal_(generator=torch.Generator().manual_seed(0))
        self._digest.update(sample(drawn).encode())
        return self._digest.hexdigest()

    def _origin(self, name: str, tensor: torch.Tensor) -> View | torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return self._window(tensor)
        if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__}"
            raise NotRecordable(f"{name} is {kind}")
        return tensor.detach()

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of a tensor that a module keeps unregistered: whole on every rank."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = self._history.value(self._window(tensor))
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(value, tensor.requires_grad) if is_parameter else value

    def _check_nothing_left(self) -> None:
        """NotRecordable if a tensor without data is still referenced and could be used."""
        left = [weakref.ref(storage) for storage in self._held]
        self._held.clear()
        if any(each() is not None for each in left):
            gc.collect()
        for number, each in enumerate(left):
            if each() is not None:
                size = self._history.num_bytes[number]
                raise NotRecordable(f"a tensor of {size:,} bytes is kept outside of the modules")


class RecordedWeights:
    """Weights, by name, of a model on the meta device."""

    def __init__(
        self, history: _History, origins: Mapping[str, View | torch.Tensor], digest: str
    ) -> None:
        self._history = history
        self._origins = dict(origins)
        self.digest = digest
        """Equal on two ranks if their weights are equal."""

    def part(self, name: str, box: Box) -> torch.Tensor:
        """Create a tensor as a whole and return a part of it."""
        origin = self._origins[name]
        return (self._history.value(origin) if isinstance(origin, View) else origin)[box]

    @contextmanager
    def opened(self) -> Iterator[Part]:
        yield self.part

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """Tensors that already exist: small ones, and those read from files."""
        return {name: t for name, t in self._origins.items() if isinstance(t, torch.Tensor)}


def without_values(
    model: nn.Module,
    origin_of: Callable[[str, torch.Tensor], Origin],
    settle: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[str, Origin]:
    """Move a model to the meta device, in place; tied tensors stay tied.

    `origin_of` is called for each parameter and buffer, and its results are returned by name;
    `settle` converts tensors that modules keep without registering them.
    """
    origins: dict[str, Origin] = {}
    known: dict[int, tuple[torch.Tensor, torch.Tensor, Origin]] = {}
    """By id of a tensor or of its replacement: the tensor, its replacement and its origin."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):  # noqa: SLF001 - in their order
            for key, tensor in held.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if id(tensor) not in known:
                    entry = (tensor, _on_meta(tensor), origin_of(name, tensor))
                    known[id(tensor)] = known[id(entry[1])] = entry
                held[key], origins[name] = known[id(tensor)][1:]

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return known[id(tensor)][1] if id(tensor) in known else settle(tensor)

    for module in model.modules():
        for key, value in vars(module).items():
            has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
            if has_tensors and key not in ("_parameters", "_buffers", "_modules"):
                vars(module)[key] = tree_map_only(torch.Tensor, kept, value)
    return origins


def sample(tensor: torch.Tensor) -> str:
    """Return a digest of a few values, enough because weights are read or drawn as a whole."""
    if tensor.is_meta or not tensor.numel():
        return ""
    some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _MOST_SAMPLED)]
    data = some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


_MOST_SAMPLED = 64


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without values, with the attributes that were set on it."""
    size, stride = tensor.shape, tensor.stride()
    meta = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, tensor.requires_grad)
    for key, value in vars(tensor).items():
        if key not in _OF_FAKES:
            setattr(meta, key, value)
    return meta


_OF_FAKES = frozenset(
    ("fake_device", "fake_mode", "constant", "real_tensor", "pytype", "dispatch_keys")
)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to."""
    written = []
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def _returns_tensor(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_all(tensor: torch.Tensor) -> bool:
    """True if a tensor covers its whole storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its address
    return key
