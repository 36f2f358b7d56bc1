"""Fake tensors for a rehearsal: shapes and lifetimes are real, contents are not.

Weights, activations, gradients and optimizer state are torch's fake tensors. Integers and single
values stay real (token ids, positions, counters, optimizer steps), so that code that depends on
them behaves as usual. Reading a value from a fake tensor returns 1, and is recorded.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch._C import _distributed_c10d as _c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from drivetrain.rehearse.calls import NAMESPACES, Line, RehearsedCall, describe, here
from drivetrain.rehearse.mailbox import Mailbox

# Live bytes: every storage that a rank creates, from its creation to its end.
#
# This counts what tensors hold. Memory reserved by a caching allocator, library workspaces and the
# device context come on top and are unknown here.

_LOOK_AGAIN = 1.02
"""Look up a peak's line only if the peak has grown by this factor, since it is expensive."""


class LiveBytes:
    """Counts live bytes and remembers the peak."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.peak_line: Line | None = None
        self.over: tuple[str, Line | None] | None = None
        """The activity and the line at which the limit was first passed."""
        self.doing = "building the model"
        self._limit: int | None = None
        self._looked_at = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def see(self, made: Any) -> None:
        """Count the tensors that an operator returned."""
        if isinstance(made, torch.Tensor):
            self._see(made)
        elif made is not None:
            for leaf in tree_leaves(made):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)

    def watch(self, limit: int | None) -> None:
        """Restart the peak and apply the limit: a model is built in host memory, then placed."""
        self.peak, self._looked_at, self._limit = 0, 0, limit
        self._count(0)

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Track resized storages: FSDP frees and fills them in place, which no operator shows."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._sizes.get(id(storage))
            if known is not None and known[0]() is storage:
                self._count(storage.nbytes() - known[1])
                self._sizes[id(storage)] = (known[0], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a wrapper: what it wraps is counted separately
            return
        key = id(storage)
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            last = self._sizes.pop(key, None)
            if last is not None:
                self.live -= last[1]

        self._sizes[key] = (weakref.ref(storage, gone), size)
        self._count(size)

    def _count(self, num_bytes: int) -> None:
        self.live += num_bytes
        if self.live <= self.peak:
            return
        self.peak = self.live
        if self.peak > self._looked_at * _LOOK_AGAIN:
            self._looked_at = self.peak
            self.peak_line = here()
        if self._limit is not None and self.over is None and self.live > self._limit:
            self.over = (self.doing, here())


_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - its only name
_READ = _aten._local_scalar_dense.default  # noqa: SLF001 - what .item() becomes
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001
_LARGEST_REAL = 2**20
"""Larger integer tensors are fake, too, such as the attention mask of a long sequence."""


class FakeTensorDispatch(TorchDispatchMode):
    """Active while a model is built, parallelized and trained; not while data is read."""

    def __init__(self, memory: LiveBytes, mailbox: Mailbox | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.memory = memory
        self.mailbox = mailbox
        self.calls: list[RehearsedCall] = []
        self.values_read: list[Line | None] = []
        self.builds = False
        """While the model is built, everything is fake."""

    def __enter__(self) -> Self:
        """Make fake tensors pickle as their shapes.

        A pipeline's last stage sends its output to other ranks as an object.
        """
        copyreg.pickle(FakeTensor, _sent_as_shape)
        _Received.made_by = self.fake
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        copyreg.dispatch_table.pop(FakeTensor, None)  # the table is global to the process

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count tensors and collectives; torch does the rest."""
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # noqa: SLF001
            return func(*args, **kwargs)  # torch only infers a shape; nothing is created
        if any(_has_parts(kind) for kind in types):
            return NotImplemented  # a DTensor first becomes operators on what this rank holds
        if getattr(func, "namespace", "") in NAMESPACES:
            made = self._communicate(func, args, kwargs)
        elif func is _READ and isinstance(args[0], FakeTensor):
            self.values_read.append(here())
            return _one(args[0].dtype)
        elif self._is_made_anew(func, args, kwargs):
            with self.fake:
                made = func(*args, **kwargs)
        else:
            _check_indices(func, args)
            made = func(*args, **kwargs)
        self.memory.see(made)
        return made

    def stand_in(self, batch: Any) -> Any:
        """Return a batch with fake floating-point tensors; integers stay real."""

        def one(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                value = self.fake.from_tensor(value)
            self.memory.see(value)
            return value

        return tree_map(one, batch)

    def replace_weights(self, model: nn.Module) -> None:
        """Replace real weights: those built elsewhere or from lists and arrays are not fake yet."""
        made: dict[int, nn.Parameter] = {}
        """By the weight's identity, so that tied weights stay tied."""
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if isinstance(weight, FakeTensor):
                    continue
                if id(weight) not in made:
                    fake = self.stand_in(weight.detach())
                    made[id(weight)] = nn.Parameter(fake, requires_grad=weight.requires_grad)
                module.register_parameter(name, made[id(weight)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not isinstance(buffer, FakeTensor):
                    setattr(module, name, self.stand_in(buffer))

    def _is_made_anew(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator creates a tensor that must be fake; small ones may stay real."""
        if tree_any(lambda leaf: isinstance(leaf, torch.Tensor), (args, kwargs)):
            return False
        if not isinstance(func, torch._ops.OpOverload) or not func._schema.returns:  # noqa: SLF001
            return False
        if str(func._schema.returns[0].type) != "Tensor":  # noqa: SLF001
            return False
        if self.builds:
            return True
        with self.fake:
            shape = func(*args, **kwargs)
        small = 1 if shape.is_floating_point() or shape.is_complex() else _LARGEST_REAL
        return bool(shape.numel() > small)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_fake = tree_any(lambda leaf: isinstance(leaf, FakeTensor), (args, kwargs))
        if is_fake and func is _WAIT:
            return args[0]  # as the real operator; torch's fake one would create another tensor
        if is_fake and func.namespace == "c10d":
            # bypass torch's fake group, which copies into each of thousands of outputs
            self._note(func, args, kwargs, None)
            return _done(func, args)
        made = func(*args, **kwargs)
        call = self._note(func, args, kwargs, made)
        if call is not None and not is_fake and self.mailbox is not None:
            _deliver(call, func, args, self.mailbox)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> RehearsedCall | None:
        call = describe(func, args, kwargs, made, here())
        if call is not None:
            self.calls.append(call)
        return call


class _Received:
    """Creates a fake tensor from one that another rank sent."""

    made_by: FakeTensorMode

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with cls.made_by:
            return torch.empty(shape, dtype=dtype)


def _sent_as_shape(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    return _Received.make, (tuple(tensor.shape), tensor.dtype)


def _has_parts(kind: type) -> bool:
    """Whether a tensor type wraps other tensors, as DTensor does."""
    is_plain = issubclass(kind, (FakeTensor, torch.nn.Parameter)) or kind is torch.Tensor
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return not is_plain and dispatch is not torch.Tensor.__torch_dispatch__


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _done(func: Any, args: tuple[Any, ...]) -> Any:
    """Return what an operator returns when its collective has completed."""
    future: Any = torch.futures.Future()
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    future.set_result(tensors)
    made: Any = _c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # noqa: SLF001
    work = made.boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)  # noqa: SLF001


def _deliver(call: RehearsedCall, func: Any, args: Any, mailbox: Mailbox) -> None:
    """Write the other ranks' values where the collective would have put them."""
    operator = func._schema.name.partition("::")[2]  # noqa: SLF001
    if operator == "send":
        mailbox.send(call, args[0])
        return
    received = _received(operator, call, args, mailbox)
    for tensor, value in received:
        tensor.copy_(value)


def _received(
    operator: str, call: RehearsedCall, args: Any, mailbox: Mailbox
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a tensor to fill and its value."""
    if operator == "recv_":
        return list(zip(args[0], mailbox.receive(call) or args[0], strict=True))
    if operator == "broadcast_":
        return list(zip(args[0], mailbox.exchange(call, args[0])[args[2]], strict=True))
    if operator == "allreduce_":  # torch does not expose the reduction; assume a sum
        given = mailbox.exchange(call, args[0])
        return [
            (tensor, torch.stack([values[position] for values in given]).sum(0))
            for position, tensor in enumerate(args[0])
        ]
    if operator == "allgather_":
        given = mailbox.exchange(call, args[1])
        return [
            (output, values[position])
            for position, outputs in enumerate(args[0])
            for output, values in zip(outputs, given, strict=True)
        ]
    return []


def _check_indices(func: Any, args: tuple[Any, ...]) -> None:
    """Check real indices into a fake table: a device would only report "assertion failed"."""
    if func is _aten.embedding.default and not isinstance(args[1], FakeTensor):
        _in_range(args[1], args[0].shape[0], "an embedding", "rows")
    elif func is _aten.nll_loss_forward.default and not isinstance(args[1], FakeTensor):
        targets = args[1][args[1] != args[4]]
        _in_range(targets, args[0].shape[-1 if args[0].dim() == 1 else 1], "a loss", "classes")


def _in_range(indices: torch.Tensor, size: int, what: str, of: str) -> None:
    if indices.numel() == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise IndexError(f"index {wrong} is out of range for {what} with {size} {of}")
