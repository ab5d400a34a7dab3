"""The structure of a model, as `plan_units` sees it: paths, repetition, who reads whose weights."""

from __future__ import annotations

import dis
import inspect
import itertools
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import torch.nn as nn

# Reading these of a parameter needs no values.
_METADATA = {"dtype", "device", "shape", "size", "ndim", "dim", "requires_grad", "numel", "is_meta"}


class Structure:
    """A model's modules by path.

    Attributes:
        modules: each distinct module once, by the first path that leads to it.
        all_modules: all paths, those of shared modules too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.all_modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.all_paths = list(self.all_modules)
        self._first = {id(module): path for path, module in self.modules.items()}

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, tied ones once."""
        return self.numel_of([""])

    def first_path(self, path: str) -> str:
        """The path under which the module at `path` is known in `modules`."""
        return self._first[id(self.all_modules[path])]

    def children(self, path: str) -> list[str]:
        """First paths of the distinct modules directly inside the one at `path`, in order."""
        return [self._first[id(child)] for child in self.modules[path].children()]

    def inside(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Modules strictly inside the one at `path`, by their first path."""
        for module in self.modules[path].modules():
            if module is not self.modules[path]:
                yield self._first[id(module)], module

    def numel_of(self, paths: Iterable[str]) -> int:
        """Elements of the distinct parameters of the modules at `paths`."""
        return sum({id(p): p.numel() for path in paths for p in self.modules[path].parameters()}.values())

    def outside(self, paths: Iterable[str]) -> list[nn.Parameter]:
        """Parameters held by modules that are in none of those at `paths`."""
        within = {id(module) for path in paths for module in self.modules[path].modules()}
        return [
            parameter
            for module in self.modules.values()
            if id(module) not in within
            for parameter in module.parameters(recurse=False)
        ]


def is_called(module: nn.Module) -> bool:
    """False for containers such as ModuleList: they have no forward, so nothing can hook it."""
    return type(module).forward is not nn.Module.forward


def is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Class, and names and shapes of all parameters."""
    parameters = module.named_parameters(remove_duplicate=False)
    return (type(module), frozenset((name, tuple(p.shape)) for name, p in parameters))


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Repetitions of a block: one class, and at least half of all names and shapes in common.

    Not all of them: the first block of a stack often has something more (T5's position bias).
    """
    (kind, mine), (other_kind, theirs) = signature(one), signature(other)
    return kind is other_kind and 2 * len(mine & theirs) >= len(mine | theirs)


# Repetition


@dataclass(frozen=True)
class Run:
    """Siblings that a parent goes through in order."""

    name: str
    paths: tuple[str, ...]


def sequences(structure: Structure, path: str) -> list[Run]:
    """The runs among the children of a module.

    All children of a Sequential or ModuleList, and of a ModuleDict whose keys count up; for
    other modules, children whose names differ by their number only (layer1, layer2).
    """
    module = structure.modules[path]
    children = [child for child in structure.children(path) if structure.numel_of([child])]
    if isinstance(module, nn.Sequential | nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and all(re.search(r"\d", key) for key in module)
    ):
        return [Run(f"{path}[]", tuple(children))] if children else []
    if isinstance(module, nn.ModuleDict):
        return []
    stems: dict[str, list[str]] = {}
    for child in children:
        if numbered := re.fullmatch(r"(.*?)_?\d+", child.rpartition(".")[2]):
            stems.setdefault(f"{path}.{numbered[1]}#", []).append(child)
    return [Run(stem, tuple(paths)) for stem, paths in stems.items() if len(paths) > 1]


def find_blocks(structure: Structure) -> set[str]:
    """Paths of the repeated blocks: modules with children, of which another in the same run is alike.

    A class that repeats with equal shapes somewhere also counts where its shapes differ
    (the first block of a stage, which changes the width).
    """
    classes: set[type] = set()
    blocks: set[str] = set()

    def note_class(item: str, repeated: bool) -> bool:
        if repeated:
            classes.add(type(structure.modules[item]))
        return repeated

    def note_block(item: str, _: bool) -> bool:
        if type(structure.modules[item]) not in classes:
            return False
        blocks.add(item)
        return True

    _scan(structure, "", note_class)
    _scan(structure, "", note_block)
    return blocks


def _scan(structure: Structure, path: str, take: Callable[[str, bool], bool]) -> None:
    """Offer the items of all runs to `take`, from outside inwards, not into those it takes."""
    runs = sequences(structure, path)
    in_run = {item: run for run in runs for item in run.paths}
    for child in structure.children(path):
        module = structure.modules[child]
        if is_leaf(module) or not structure.numel_of([child]):
            continue
        if child in in_run and is_called(module) and not _are_experts(path):
            repeated = any(
                are_alike(module, structure.modules[item]) for item in in_run[child].paths if item != child
            )
            if not (repeated and _is_stage(structure, child)) and take(child, repeated):
                continue
        if not _are_experts(child):
            _scan(structure, child, take)


def _are_experts(path: str) -> bool:
    """Experts are called or not by what a rank's tokens need; as units they would hang."""
    return "expert" in path.rpartition(".")[2].lower()


def _is_stage(structure: Structure, path: str) -> bool:
    """Whether a repeated module is large and mainly a run of repeated modules itself."""
    whole = structure.numel_of([path])
    if 4 * whole <= structure.numel:
        return False
    for inner in [path, *(p for p in structure.children(path) if not is_called(structure.modules[p]))]:
        for run in sequences(structure, inner):
            items = [structure.modules[item] for item in run.paths]
            if (
                any(are_alike(one, other) for one, other in itertools.pairwise(items) if not is_leaf(one))
                and 2 * structure.numel_of(run.paths) >= whole
                and not _are_experts(inner)
                and not _has_router(structure.modules[path], items)
            ):
                return True
    return False


def _has_router(module: nn.Module, items: Sequence[nn.Module]) -> bool:
    """Whether something beside the items has a dim as long as they are many: it chooses among them."""
    within = {id(parameter) for item in items for parameter in item.parameters()}
    return any(len(items) in p.shape for p in module.parameters() if id(p) not in within)


# Weights that are read without calling their module


def directly_read(module: nn.Module) -> set[str]:
    """Relative paths of submodules whose parameters the forward of `module` reads itself.

    From the byte code of forward and of the methods that it calls on self: `self.head.weight`
    counts, `self.head(x)` and `self.head.weight.dtype` don't.
    """
    found = set()
    for chain in _attribute_chains(cast(Hashable, type(module))):
        owner = module
        for position, name in enumerate(chain):
            if name in dict(owner.named_parameters(recurse=False)):
                if position and not (position + 1 < len(chain) and chain[position + 1] in _METADATA):
                    found.add(".".join(chain[:position]))
                break
            child = dict(owner.named_children()).get(name)
            if child is None:
                break
            owner = child
    return found


@cache
def _attribute_chains(kind: Hashable) -> frozenset[tuple[str, ...]]:
    """Chains a.b.c that are read from self in forward, and in methods reached from it."""
    chains: set[tuple[str, ...]] = set()
    waiting, done = ["forward"], set()
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        function = inspect.unwrap(getattr(kind, name, None) or (lambda: None))
        if not isinstance(function, types.FunctionType) or function.__module__ == nn.Module.__module__:
            continue
        for chain in _chains_in(function.__code__):
            chains.add(chain)
            waiting.append(chain[0])
    return frozenset(chains)


def _chains_in(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    chain: list[str] | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_FAST") or instruction.opname == "LOAD_DEREF":
            if chain:
                yield tuple(chain)
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            chain = [] if names[-1] == "self" else None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain is not None:
            chain.append(instruction.argval)
        elif instruction.opname not in ("CACHE", "PRECALL"):
            if chain:
                yield tuple(chain)
            chain = None
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _chains_in(constant)
