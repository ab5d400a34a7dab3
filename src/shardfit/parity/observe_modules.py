"""The modules that a script trains: names, parts and gradients of parameters, and FSDP2's units."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardfit import _torch
from shardfit.parity.recording import Part

# What wrappers put into the path of a parameter; the original would not.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})


@dataclass
class Held:
    """A parameter that is followed from the first step on."""

    name: str
    tensor: Tensor
    in_model: bool


class Models:
    """The trained modules of the process, found alive, and their parameters by name."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.roots: list[nn.Module] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._called: list[weakref.ref[nn.Module]] = []
        self._early: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._known: set[int] = set()

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has been built: its tensors are named now, while their modules still hold them."""
        self._optimizers.append(weakref.ref(optimizer))
        new = [t for t in _tensors_of([optimizer]) if id(t) not in self._early]
        if not new:
            return
        roots = _find_roots(new, [])
        for name, tensor in _named_parameters(roots):
            self._early.setdefault(id(tensor), (weakref.ref(tensor), name))

    def add_called(self, module: nn.Module) -> None:
        """A module has been called, with gradients on, by nothing but the script."""
        if not any(ref() is module for ref in self._called):
            self._called.append(weakref.ref(module))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Alive, in the order in which they were built."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def refresh(self) -> None:
        """Look for modules and parameters again, if an optimizer holds some that aren't known."""
        tensors = _tensors_of(self.optimizers)
        if self.held and all(id(tensor) in self._known for tensor in tensors):
            return
        called = [module for ref in self._called if (module := ref()) is not None]
        self.roots = _find_roots(tensors, called)
        self.held = []
        inside: dict[int, str] = {}
        for name, tensor in _named_parameters(self.roots):
            if id(tensor) not in inside:
                inside[id(tensor)] = name
                self.held.append(Held(name, tensor, in_model=True))
        # A unit that is gathered just now shows its modules other tensors than the optimizer has.
        sharded = {id(t) for unit in self.units() or [] for t in unit.params}
        for tensor in tensors:
            if id(tensor) in inside:
                continue
            inside[id(tensor)] = ""
            ref, name = self._early.get(id(tensor), (None, f"unnamed.{len(self.held)}"))
            if ref is not None and ref() is not tensor:
                name = f"unnamed.{len(self.held)}"
            if id(tensor) in sharded:
                self.held = [held for held in self.held if held.name != name]
            self.held.append(Held(name, tensor, in_model=id(tensor) in sharded))
        self._known = set(inside)

    def held_by(self, tensors: Iterable[Tensor]) -> list[Held]:
        """Those of `held` that are among `tensors`."""
        ids = {id(tensor) for tensor in tensors}
        return [held for held in self.held if id(held.tensor) in ids]

    def names_for(self, optimizer: Optimizer) -> list[str]:
        """Of all parameters, without those that only other optimizers hold."""
        own = {id(t) for t in _tensors_of([optimizer])}
        others = {id(t) for t in _tensors_of([o for o in self.optimizers if o is not optimizer])} - own
        return [held.name for held in self.held if id(held.tensor) not in others]

    def units(self) -> list[_torch.FsdpUnit] | None:
        """FSDP2's units of all trained modules. None: unknown."""
        found = [_torch.fsdp_units(root) for root in self.roots]
        return None if any(units is None for units in found) else [u for units in found for u in units or []]

    def squares(self, only: Iterable[Tensor] | None = None) -> dict[str, float]:
        """By name, the sum of squares of this rank's part of each gradient, in float64."""
        wanted = None if only is None else {id(tensor) for tensor in only}
        sums: dict[torch.device, dict[str, Tensor]] = {}
        names: set[str] = set()
        for held in self.held:
            if held.tensor.grad is None or held.name in names:
                continue
            if wanted is not None and id(held.tensor) not in wanted:
                continue
            grad = _local_values(held.tensor.grad, like=held.tensor)
            names.add(held.name)
            norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
            sums.setdefault(norm.device, {})[held.name] = norm.square()
        # One read of a device, not one for each parameter.
        return {
            name: value
            for found in sums.values()
            for name, value in zip(found, torch.stack(list(found.values())).tolist(), strict=True)
        }

    def parts(self) -> list[tuple[Part, Tensor]]:
        """Each parameter's part on this rank, with its values: a plain tensor on the CPU."""
        counts = Counter(
            id(t)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for t in group["params"]
        )
        return [
            (_part(held, counts[id(held.tensor)]), _torch.local_of(held.tensor.detach()).detach().cpu())
            for held in self.held
        ]

    @property
    def device(self) -> str:
        """Type of the device that holds the first parameter."""
        return self.held[0].tensor.device.type if self.held else "cpu"

    def digests(self, *, whole_only: bool) -> dict[str, str]:
        """Of this rank's values by name; `whole_only`: of those that are not sharded."""
        return {
            held.name: digest(_torch.local_of(held.tensor.detach()))
            for held in reversed(self.held)
            if not (whole_only and _is_sharded(held.tensor))
        }

    def buffers(self) -> dict[str, str]:
        """Digests of floating-point buffers, by name."""
        return {
            _clean(name): digest(_torch.local_of(buffer))
            for root in self.roots
            for name, buffer in root.named_buffers()
            if buffer.is_floating_point() and not buffer.is_meta
        }

    def facts(self, world: int) -> dict[str, Any]:
        """What is documented in `shardfit.parity.recorder` under modules and parameters."""
        names = {id(held.tensor): held.name for held in self.held}
        trained = {id(tensor) for tensor in _tensors_of(self.optimizers)}
        in_model = [held for held in self.held if held.in_model]
        units = self.units()
        is_sharded = bool(units) or any(isinstance(root, FSDPModule) for root in self.roots)
        facts: dict[str, Any] = {
            "models": [class_name(root) for root in self.roots],
            "fsdp_units": None if units is None else [_unit_facts(unit, names) for unit in units],
            "root_sharded": all(_is_unit(root) for root in self.roots) if is_sharded else None,
            "ddp": any(isinstance(m, DistributedDataParallel) for root in self.roots for m in root.modules()),
            "orphans": [held.name for held in self.held if not held.in_model],
            "not_in_optimizer": [
                held.name for held in in_model if held.tensor.requires_grad and id(held.tensor) not in trained
            ],
        }
        if world > 1:
            facts["unsharded"] = [
                held.name
                for held in in_model
                if held.tensor.requires_grad and not isinstance(held.tensor, DTensor)
            ]
        return facts

    def data_place(self) -> tuple[int, int]:
        """This rank's place among those with different data, and their number."""
        for unit in self.units() or []:
            coordinate = unit.mesh.get_coordinate()
            if coordinate is None:
                continue
            place = 0
            for dim, index in enumerate(coordinate):
                place = place * unit.mesh.size(dim) + index
            return place, unit.mesh.size()
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1


def ancestors_of(module: nn.Module) -> Iterator[nn.Module]:
    """All modules alive that contain `module`."""
    parents = _parents(_alive_modules())
    pending, seen = [module], {id(module)}
    while pending:
        for parent in parents.get(id(pending.pop()), ()):
            if id(parent) not in seen:
                seen.add(id(parent))
                pending.append(parent)
                yield parent


def class_name(module: nn.Module) -> str:
    """Of the class that the script wrote: fully_shard puts one of its own before it."""
    kinds = (kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return next(kinds).__name__


def digest(tensor: Tensor) -> str:
    """Of a plain tensor's bytes, in order of its indices."""
    values = tensor.detach().to("cpu").contiguous()
    size = values.numel() * values.element_size()
    raw = ctypes.string_at(values.data_ptr(), size) if size else b""
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _alive_modules() -> list[nn.Module]:
    # type() and not isinstance(): proxies run code of their own when asked for their class.
    return [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]


def _parents(modules: list[nn.Module]) -> dict[int, list[nn.Module]]:
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in vars(module).get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    return parents


def _find_roots(tensors: list[Tensor], called: list[nn.Module]) -> list[nn.Module]:
    """The outermost modules that hold any of `tensors`, in their order, then those of the called ones."""
    modules = _alive_modules()
    parents = _parents(modules)
    order = {id(tensor): i for i, tensor in enumerate(tensors)}
    first: dict[int, int] = {}
    by_id = {id(module): module for module in modules}

    def climb(module: nn.Module) -> Iterator[nn.Module]:
        pending, seen = [module], {id(module)}
        while pending:
            current = pending.pop()
            above = parents.get(id(current), [])
            if not above:
                yield current
            for parent in above:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    pending.append(parent)

    def note(module: nn.Module, place: int) -> None:
        for root in climb(module):
            by_id[id(root)] = root
            first[id(root)] = min(place, first.get(id(root), place))

    for module in modules:
        places = [order[id(p)] for p in vars(module).get("_parameters", {}).values() if id(p) in order]
        if places:
            note(module, min(places))
    for i, module in enumerate(called):
        note(module, len(tensors) + i)
    return [by_id[key] for key in sorted(first, key=lambda key: first[key])]


def _named_parameters(roots: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    names = [class_name(root) for root in roots]
    for i, root in enumerate(roots):
        prefix = ""
        if len(roots) > 1:
            twins = [j for j, name in enumerate(names) if name == names[i]]
            prefix = f"{names[i]}{twins.index(i) if len(twins) > 1 else ''}."
        for name, parameter in root.named_parameters():
            yield prefix + _clean(name), parameter


def _clean(name: str) -> str:
    path = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(path) > 1 and path[0] == "module":
        path = path[1:]
    return ".".join(path)


def _tensors_of(optimizers: list[Optimizer]) -> list[Tensor]:
    return [t for optimizer in optimizers for group in optimizer.param_groups for t in group["params"]]


def _local_values(grad: Tensor, *, like: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        if isinstance(like, DTensor) and grad.placements != like.placements:
            grad = grad.redistribute(placements=like.placements)
        grad = _torch.local_of(grad)
    return grad.coalesce().values() if grad.is_sparse else grad.detach()


def _is_sharded(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    mesh = tensor.device_mesh
    return any(not p.is_replicate() and mesh.size(axis) > 1 for axis, p in enumerate(tensor.placements))


def _is_unit(module: nn.Module) -> bool:
    # torch.compile and checkpoint wrappers have one module inside.
    if isinstance(module, FSDPModule):
        return True
    inner = [child for name, child in module.named_children() if name in _WRAPPERS]
    return len(inner) == 1 and _is_unit(inner[0])


def _part(held: Held, in_optimizer: int) -> Part:
    tensor = held.tensor
    local = _torch.local_of(tensor)
    chunk = _torch.chunk_of(tensor) if isinstance(tensor, DTensor) else None
    offset, extent = chunk or ((0,) * local.ndim, tuple(local.shape))
    return Part(
        name=held.name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        spread="sharded" if _is_sharded(tensor) else "whole",
        offset=tuple(offset),
        extent=tuple(extent),
        trainable=tensor.requires_grad,
        in_model=held.in_model,
        in_optimizer=in_optimizer,
    )


def _unit_facts(unit: _torch.FsdpUnit, names: dict[int, str]) -> dict[str, Any]:
    return {
        "path": _clean(unit.path),
        "params": [names.get(id(tensor), "?") for tensor in unit.params],
        "reshard": unit.reshard,
        "param_dtype": _dtype_name(unit.param_dtype),
        "reduce_dtype": _dtype_name(unit.reduce_dtype),
        "mesh": list(unit.mesh.shape),
        "root": unit.is_root,
    }


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
