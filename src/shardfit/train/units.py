"""plan_units: which modules are sharded together, read off a model's structure."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch.nn as nn
from torch.nn.parameter import UninitializedParameter

from shardfit.errors import ShardfitError
from shardfit.plan import Checkpointing, MeshShape, Plan, Precision, Unit
from shardfit.train.pieces import units_by_structure
from shardfit.train.structure import Structure

Pattern = str | Sequence[str] | Unit


def plan_units(
    model: nn.Module,
    *,
    units: Sequence[Pattern] | None = None,
    mesh: MeshShape = MeshShape(),  # noqa: B008
    precision: Precision = Precision(),  # noqa: B008
    offload: bool = False,
    checkpointing: Checkpointing = "none",
    compile: bool = False,
    prefetch: int = 0,
    methods: Sequence[str] = (),
) -> Plan:
    """Decide which modules of `model` form units. The model is only looked at.

    Works on real, meta and deferred models. Without `units`:

    * Repeated blocks (modules of one class that occur with the same parameter names and
      shapes in a ModuleList, a Sequential, a ModuleDict with counted keys, or as numbered
      attributes) are a unit each; the outermost repetition counts, unless it holds
      most of the model and has a repetition inside.
    * Neighbours in one sequence that are smaller than 2**20 elements, and than a sixteenth
      of the model, are joined.
    * Outside the blocks, each module of at least that size is a unit; the last one after
      the blocks, with the small ones right before it ([norm, head]), stays gathered
      between forward and backward.
    * The root holds what is left: small modules, parameters that are its own or its
      containers', tied weights of modules outside the blocks, and modules whose weights a
      forward reads without calling them.

    What can't be seen here: a parent that indexes into a list and reads its items'
    weights. Give `units` for such a model.

    Args:
        model: any module.
        units: the units by hand: for each, a path pattern whose matches are a unit each
            ("layers.*"; `*` stays within one name), a list of patterns whose matches are
            one unit together (["norm", "head"]), or a `Unit`. The root is added.
        mesh, precision, offload, checkpointing, compile, prefetch, methods: see `Plan`.

    Raises:
        ShardfitError: a pattern that matches nothing, or a container without forward
            (SF308); a module named twice (SF319).
    """
    if lazy := [path for path, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ShardfitError(
            "a lazy parameter has no shape yet",
            evidence=", ".join(lazy),
            fix="run one forward on a small input first",
        )
    structure = Structure(model)
    found = _by_hand(structure, units) if units is not None else units_by_structure(structure)
    return Plan(
        units=_counted(structure, _leaves_first(found)),
        mesh=mesh,
        precision=precision,
        offload=offload,
        checkpointing=checkpointing,
        compile=compile,
        prefetch=prefetch,
        methods=tuple(methods),
    )


# By hand


def _by_hand(structure: Structure, patterns: Sequence[Pattern]) -> list[Unit]:
    if isinstance(patterns, str):
        patterns = [patterns]
    units = []
    for pattern in patterns:
        if isinstance(pattern, Unit):
            units.append(pattern)
        elif isinstance(pattern, str):
            matches = _match(structure, pattern)
            units += [Unit(paths=(path,), why=f"by hand: {pattern}") for path in matches]
        else:
            paths = dict.fromkeys(path for part in pattern for path in _match(structure, part))
            units.append(Unit(paths=tuple(paths), why=f"by hand: {', '.join(pattern)} together"))
    if not any("" in unit.paths for unit in units):
        units.append(Unit(paths=("",), reshard=False, why="what the units by hand leave"))
    return units


def _match(structure: Structure, pattern: str) -> list[str]:
    """Paths of the distinct modules that match; `*` stays within one name."""
    parts = pattern.split(".") if pattern else []
    matches = dict.fromkeys(
        structure.first_path(path)
        for path in structure.all_paths
        if len(names := path.split(".") if path else []) == len(parts)
        and all(fnmatch.fnmatchcase(name, part) for name, part in zip(names, parts, strict=True))
    )
    if not matches:
        near = difflib.get_close_matches(pattern, structure.all_paths, n=3, cutoff=0.4)
        raise ShardfitError(
            "a unit's pattern matches no module",
            evidence=f"{pattern!r}; near misses: {', '.join(near) or 'none'}",
            fix="give paths as model.named_modules() has them; * stays within one name",
        )
    return list(matches)


# Order and counts


def _leaves_first(units: Iterable[Unit]) -> list[Unit]:
    """The same units, in order, but each after those that are inside it."""
    waiting = list(units)
    ordered: list[Unit] = []
    while waiting:
        for unit in waiting:
            if not any(_is_inside(other, unit) for other in waiting if other is not unit):
                break
        else:
            unit = waiting[0]  # Plan says what is wrong with it.
        waiting.remove(unit)
        ordered.append(unit)
    return ordered


def _is_inside(inner: Unit, outer: Unit) -> bool:
    return any(
        path != other and (other == "" or path.startswith(other + "."))
        for path in inner.paths
        for other in outer.paths
    )


def _counted(structure: Structure, units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The units with `num_params`: what each holds that no earlier unit has taken."""
    taken: set[int] = set()
    counted = []
    for unit in units:
        own = {
            id(p): p.numel()
            for path in unit.paths
            if path in structure.all_modules
            for p in structure.all_modules[path].parameters()
            if id(p) not in taken
        }
        taken |= set(own)
        counted.append(replace(unit, num_params=sum(own.values())))
    return tuple(counted)
