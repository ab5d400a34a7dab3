"""Tape: what was done to tensors that own no memory, and how to do it again for one of them.

While it records, a large new tensor is a fake: it has shape, dtype and strides, and claims a
device, but owns no memory. Each operator that creates or writes one is kept with the generator
state that it saw; random ones also run once on a scratch tensor, so that the real generator ends
where plain construction leaves it. The value of a tensor is then a backward slice of the tape, by
storage, so views, `.data` and tied weights need no special case.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardfit import _torch
from shardfit._torch import tree_leaves, tree_map
from shardfit.errors import ShardfitError

aten = torch.ops.aten
_OVERWRITES = frozenset(
    {
        aten.normal_.default,
        aten.uniform_.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.bernoulli_.float,
        aten.bernoulli_.Tensor,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.cauchy_.default,
        aten.exponential_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.copy_.default,
    }
)
_UNWRITTEN_FACTORIES = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a way to look at a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def covers(self) -> int:
        """Bytes of the storage that a dense view of this size has."""
        numel = 1
        for size in self.size:
            numel *= size
        return numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Watched:
    """A large real tensor that an operator read, and its version at the time."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        if _torch.version_of(self.tensor) != self.version:
            raise ShardfitError(
                "a tensor that the model's construction read has been changed since",
                evidence=f"shape {tuple(self.tensor.shape)}, {self.tensor.dtype}",
                fix="call shard() before changing it, or give the constructor a copy",
            )
        return self.tensor


@dataclass(slots=True)
class _Op:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[View | None]
    reads: set[int] = field(default_factory=set)
    overwrites: bool = False
    random_state: Tensor | None = None
    has_generator: bool = False


class Tape:
    """Recorded operators, in order. `record` is called for each operator while recording."""

    def __init__(self, *, min_numel: int) -> None:
        self.min_numel = min_numel
        self.fakes = _torch.make_fake_mode(self._record_late)
        self._ops: list[_Op] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        # Keeps storages alive, so that a key is never used twice.
        self._storages: dict[int, torch.UntypedStorage] = {}
        # The last forced read: operators that it ran, and what they left. A loop that reads a
        # value in each turn (rejection sampling) goes on from there.
        self._forced: tuple[set[int], dict[int, torch.UntypedStorage]] = (set(), {})
        self._has_warned = False

    # Recording

    def owns(self, value: Any) -> bool:
        """Whether a value is one of this tape's tensors."""
        return _torch.fake_mode_of(value) is self.fakes

    def view_of(self, tensor: Tensor) -> View:
        """How a tensor of this tape looks at its storage."""
        return View(
            _torch.storage_key(tensor),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def record(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator while recording: deferred where it makes or touches a deferred tensor."""
        leaves = tree_leaves((args, kwargs))
        deferred = [leaf for leaf in leaves if self.owns(leaf)]
        if not deferred and (
            any(isinstance(leaf, Tensor) for leaf in leaves) or not self._is_large(function, args, kwargs)
        ):
            return function(*args, **kwargs)
        return self._defer(function, args, kwargs, leaves)

    def _record_late(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator on a deferred tensor outside the recorded region (`model.half()`).

        What is computed there from other tensors as well, for autograd, is a forward.
        """
        leaves = tree_leaves((args, kwargs))
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not self.owns(leaf)]
        if others and torch.is_grad_enabled() and not _torch.written_positions(function):
            raise ShardfitError(
                "a model is used while its weights are deferred",
                evidence=f"{function} on a tensor of shape {tuple(others[0].shape)} and a deferred one",
                fix="call shard() first; it writes the weights",
            )
        return self._defer(function, args, kwargs, leaves)

    def _is_large(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a factory makes more than `min_numel` elements on the CPU."""
        device = kwargs.get("device")
        if function.namespace != "aten":
            return False
        if device is not None and torch.device(device).type != "cpu":
            self._warn_of_device(torch.device(device))
            return False
        try:
            with _torch.inferring(self.fakes):
                made = function(*args, **kwargs)
        except Exception:  # whatever the operator itself would raise is for it to raise
            return False
        return sum(t.numel() for t in tree_leaves(made) if isinstance(t, Tensor)) > self.min_numel

    def _warn_of_device(self, device: torch.device) -> None:
        if device.type in ("cpu", "meta") or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"the constructor puts tensors on {device}: those made there are built plainly, whole on each "
            "rank, and deferred ones stay for shard() to place, with the CPU's draws. Leave the "
            "device to shard().",
            stacklevel=2,
        )

    def _defer(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        if function is aten._to_copy.default and kwargs.get("device") is not None:
            # Where the weights go is decided when they are written.
            self._warn_of_device(torch.device(kwargs["device"]))
            kwargs = {**kwargs, "device": torch.device("cpu")}
        generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        state = (generator or torch.default_generator).get_state() if is_random else None
        try:
            with _torch.inferring(self.fakes):
                result = function(*args, **kwargs)
        except _torch.FAKE_NEEDS_VALUES:
            result = None
        written = [args[i] for i in _torch.written_positions(function) if i < len(args)]
        written += [kwargs[name] for name in _torch.written_arguments(function) if name in kwargs]
        written = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
        if any(not self.owns(tensor) for tensor in written) or (result is None and not written):
            # A real tensor takes deferred values, or Python asks for one.
            return self._run(function, args, kwargs)
        if result is None:  # in place, where a mask says (w[w > 0] = 1): it returns what it writes
            result = written[0]
        outputs = [leaf if self.owns(leaf) else None for leaf in tree_leaves(result)]
        fresh = [o for o in outputs if o is not None and _torch.storage_key(o) not in self._storages]
        if not written and not fresh:
            return result  # a view
        if is_random:
            self._advance(function, args, kwargs)
        self._keep(function, args, kwargs, outputs, written, fresh, state, generator is not None)
        return result

    def _keep(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: list[Tensor | None],
        written: list[Tensor],
        fresh: list[Tensor],
        state: Tensor | None,
        has_generator: bool,
    ) -> None:
        frozen_args, frozen_kwargs = tree_map(self._freeze, (tuple(args), kwargs))
        op = _Op(
            function,
            frozen_args,
            frozen_kwargs,
            [None if output is None else self.view_of(output) for output in outputs],
            random_state=state,
            has_generator=has_generator,
        )
        if function in _OVERWRITES and written:
            target = self.view_of(written[0])
            op.overwrites = target.covers == written[0].untyped_storage().nbytes()
        for tensor in fresh:
            self._storages[_torch.storage_key(tensor)] = tensor.untyped_storage()
        inputs = tree_leaves((frozen_args[1:] if op.overwrites else frozen_args, frozen_kwargs))
        op.reads = {leaf.storage for leaf in inputs if isinstance(leaf, View)}
        for key in {_torch.storage_key(tensor) for tensor in (*written, *fresh)}:
            self._writers[key].append(len(self._ops))
        self._ops.append(op)

    def _freeze(self, value: Any) -> Any:
        if self.owns(value):
            return self.view_of(value)
        if not isinstance(value, Tensor):
            return value
        # A real tensor may change later: a small one is kept as it was, a large one watched.
        if value.numel() <= self.min_numel:
            return value.detach().clone()
        return _Watched(value, _torch.version_of(value))

    def _run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator on real values: it reads them into Python, or writes a real tensor."""
        real_args, real_kwargs = tree_map(self._real, (tuple(args), kwargs))
        return function(*real_args, **real_kwargs)

    def _real(self, value: Any) -> Any:
        """The real value of a deferred tensor, to be read at once and not kept."""
        if not self.owns(value):
            return value
        view = self.view_of(value)
        needed = self._needed(view.storage)
        done, storages = self._forced
        last = max(done, default=-1)
        if not all(index in done or index > last for index in needed):
            done, storages = set(), {}
        self._replay([index for index in needed if index not in done], storages)
        self._forced = (done | set(needed), storages)
        return _look(storages, view)

    def forget_reads(self) -> None:
        """Free what forced reads have left."""
        self._forced = (set(), {})

    def _advance(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run a random operator on scratch, for the generator's sake."""
        target = {id(args[i]) for i in _torch.written_positions(function) if i < len(args)}

        def scratch(value: Any) -> Any:
            if not self.owns(value):
                return value
            if id(value) in target and function in _OVERWRITES:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            real = self._real(value)
            return real.clone() if id(value) in target else real

        scratch_args, scratch_kwargs = tree_map(scratch, (tuple(args), kwargs))
        with torch.no_grad():
            function(*scratch_args, **scratch_kwargs)

    # Replaying

    def is_written(self, view: View) -> bool:
        """Whether anything but an empty allocation went into a storage."""
        return any(self._ops[i].function not in _UNWRITTEN_FACTORIES for i in self._writers[view.storage])

    def is_written_whole(self, view: View) -> bool:
        """Whether each element of a view has been written.

        Known from the operators where one of them wrote all. Otherwise the view is replayed over
        elements that show (NaN, or a pattern of bits), which stand where nothing has written.
        """
        writers = [self._ops[i] for i in self._writers[view.storage]]
        # By an operator that reads no deferred tensor, which might itself be unwritten.
        made = [] if writers[0].function in _UNWRITTEN_FACTORIES else writers[:1]
        if any(not op.reads for op in [*made, *(op for op in writers if op.overwrites)]):
            return True
        if not self.is_written(view):
            return False
        value = self.value(view, unwritten=_mark)
        return not bool(_marked(value).any())

    def digest(self) -> str:
        """Equal for the same operators in the same order, with the same generator states."""
        hasher = hashlib.sha256()
        for op in self._ops:
            hasher.update(f"{op.function} {tree_map(_outline, (op.args, op.kwargs))}".encode())
            if op.random_state is not None:
                hasher.update(op.random_state.numpy().tobytes())
        return hasher.hexdigest()

    def value(self, view: View, *, unwritten: Callable[[Tensor], None] | None = None) -> Tensor:
        """The real tensor that a view stands for, whole. `unwritten` fills what nothing has written yet."""
        storages: dict[int, torch.UntypedStorage] = {}
        self._replay(self._needed(view.storage), storages, unwritten)
        return _look(storages, view)

    def _replay(
        self,
        indices: Sequence[int],
        storages: dict[int, torch.UntypedStorage],
        unwritten: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Run operators again on `storages`, each with the generator state that it saw."""
        kept = torch.default_generator.get_state()
        try:
            with _torch.no_modes(), torch.no_grad():
                for index in indices:
                    self._run_again(self._ops[index], storages, unwritten)
        finally:
            torch.default_generator.set_state(kept)

    def _run_again(
        self,
        op: _Op,
        storages: dict[int, torch.UntypedStorage],
        unwritten: Callable[[Tensor], None] | None,
    ) -> None:
        def thaw(value: Any) -> Any:
            if isinstance(value, View):
                return _look(storages, value)
            if isinstance(value, torch.Generator):
                assert op.random_state is not None
                return torch.Generator().set_state(op.random_state)
            return value.get() if isinstance(value, _Watched) else value

        if op.random_state is not None and not op.has_generator:
            torch.default_generator.set_state(op.random_state)
        args, kwargs = tree_map(thaw, (op.args, op.kwargs))
        made = op.function(*args, **kwargs)
        for output, leaf in zip(op.outputs, tree_leaves(made), strict=True):
            if output is not None and output.storage not in storages:
                storages[output.storage] = leaf.untyped_storage()
                if unwritten is not None and op.function in _UNWRITTEN_FACTORIES:
                    unwritten(leaf)

    def _needed(self, storage: int) -> list[int]:
        """The operators that decide what is in a storage, in order."""
        needed: set[int] = set()
        waiting = [(storage, len(self._ops))]
        while waiting:
            key, before = waiting.pop()
            writers = [i for i in self._writers[key] if i < before]
            last = max((j for j, i in enumerate(writers) if self._ops[i].overwrites), default=0)
            # The first one makes the storage.
            for index in {*writers[:1], *writers[last:]} - needed:
                needed.add(index)
                waiting += [(read, index) for read in self._ops[index].reads]
        return sorted(needed)


def _outline(value: Any) -> Any:
    """An argument without what differs from process to process."""
    if isinstance(value, View):
        return value.dtype, value.size, value.stride, value.offset
    if isinstance(value, _Watched):
        return value.tensor.dtype, tuple(value.tensor.shape)
    if isinstance(value, torch.Generator):
        return "generator"
    return value.tolist() if isinstance(value, Tensor) else value


def _look(storages: dict[int, torch.UntypedStorage], view: View) -> Tensor:
    return torch.empty(0, dtype=view.dtype).set_(storages[view.storage], view.offset, view.size, view.stride)


_PATTERN = 0xA5


def _mark(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype is not torch.bool:
        tensor.view(torch.uint8).fill_(_PATTERN)


def _marked(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    mark = torch.empty(1, dtype=tensor.dtype)
    _mark(mark)
    return tensor == mark if tensor.dtype is not torch.bool else torch.zeros_like(tensor)
