"""Plan: which modules are sharded together and how, as a value.

A plan is made before the model is touched (`plan_units`), can be read, edited, saved
beside a checkpoint, and is then applied by `shard`. Standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardfit.errors import ShardfitError

Checkpointing = Literal["none", "full", "selective"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the mesh axes, outermost first.

    Attributes:
        replicate: copies of the model (HSDP); 1 is plain FSDP.
        shard: ranks that each copy is sharded over. None: whatever the other axes
            leave of the world.
        tensor: size of the tensor-parallel axis, which `parallelize_module` uses.
    """

    replicate: int = 1
    shard: int | None = None
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "tensor"):
            size = getattr(self, name)
            if size is None and name == "shard":
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ShardfitError(
                    f"the {name} axis of a mesh needs a size of at least 1",
                    evidence=f"{name}={size!r}",
                    fix="give a positive whole number, or leave it out",
                )

    def resolve(self, world: int) -> MeshShape:
        """The same shape with `shard` filled in for `world` ranks."""
        other = self.replicate * self.tensor
        shard = self.shard if self.shard is not None else max(1, world // other)
        if other * shard != world:
            raise ShardfitError(
                "the mesh does not have as many places as there are ranks",
                evidence=f"replicate={self.replicate} x shard={shard} x tensor={self.tensor} "
                f"= {other * shard}, world size {world}",
                fix="leave shard out so that it takes what is left, or launch "
                f"{other * shard} processes (torchrun --nproc-per-node)",
                code="SF104",
            )
        return dataclasses.replace(self, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes by name ("float32", "bfloat16", "float16", "float64").

    Attributes:
        param: of gathered parameters, and so of the computation. None: as stored.
        reduce: of gradient reduction. None: float32 where `param` is given, otherwise
            the gradient's own.
        master: of the stored shards, which the optimizer updates. None: float32 where
            `param` is given, otherwise as the model was built.
        output: floating outputs of the root are cast to it. None: left alone.
        cast_inputs: cast floating inputs of each unit to `param`. Only matters where
            `param` is given.
    """

    param: str | None = None
    reduce: str | None = None
    master: str | None = None
    output: str | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "master", "output"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ShardfitError(
                    f"Precision.{name} is no dtype that can be trained in",
                    evidence=f"{name}={value!r}",
                    fix=f"one of {', '.join(DTYPES)}, or None",
                )
        if self.param is not None:
            object.__setattr__(self, "reduce", self.reduce or "float32")
            object.__setattr__(self, "master", self.master or "float32")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules whose parameters are gathered and resharded together.

    Attributes:
        paths: module paths ("" is the root). Several are one parameter group.
        reshard: after forward: True reshards, False keeps the parameters gathered until
            backward, a whole number reshards to groups of that many ranks.
        why: one sentence, for people.
        num_params: elements of the parameters that the unit itself holds (those of units
            inside it are not counted); 0 where unknown.
    """

    paths: tuple[str, ...]
    reshard: bool | int = True
    why: str = ""
    num_params: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", _names("a unit's paths", self.paths))
        if not self.paths:
            raise ShardfitError("a unit needs at least one module path", fix='the root\'s path is ""')


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is sharded.

    Attributes:
        units: in the order in which they are applied, leaves first; the last is the root.
        mesh: sizes of the mesh axes.
        precision: dtypes.
        offload: keep shards, gradients and optimizer states in CPU memory.
        checkpointing: "full" recomputes each repeated block in backward, "selective" keeps
            the outputs of matrix products and attention.
        compile: compile each repeated block.
        prefetch: how many units ahead are gathered explicitly, in forward and backward.
            0 leaves it to FSDP2 (one ahead, implicitly).
        methods: names of the root's methods, other than forward, that compute with its
            parameters ("generate", "encode").
    """

    units: tuple[Unit, ...]
    mesh: MeshShape = MeshShape()
    precision: Precision = Precision()
    offload: bool = False
    checkpointing: Checkpointing = "none"
    compile: bool = False
    prefetch: int = 0
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        object.__setattr__(self, "methods", _names("methods", self.methods))
        if self.checkpointing not in ("none", "full", "selective"):
            raise ShardfitError(
                "unknown activation checkpointing",
                evidence=f"checkpointing={self.checkpointing!r}",
                fix='"none", "full" or "selective"',
            )
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ShardfitError("prefetch is a number of units", evidence=f"prefetch={self.prefetch!r}")
        seen: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            for path in unit.paths:
                if path in seen:
                    raise ShardfitError(
                        "a module is in two units",
                        evidence=f"{path or '(root)'!r} in units {seen[path]} and {index}",
                        fix="name it in one unit",
                        code="SF319",
                    )
                for outer in _ancestors(path):
                    if outer in seen and seen[outer] < index:
                        raise ShardfitError(
                            "units must be in order, leaves first",
                            evidence=f"{outer or '(root)'!r} comes before {path!r}, which is inside it",
                            fix="put inner modules before the modules that hold them",
                            code="SF303",
                        )
                seen[path] = index
        if not self.units or "" not in self.units[-1].paths:
            raise ShardfitError(
                "the root must be the last unit",
                evidence=f"last unit: {self.units[-1].paths if self.units else 'none'}",
                fix='end with Unit(paths=("",)): what is left outside every unit would drift apart',
                code="SF301",
            )

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return {"version": PLAN_VERSION, **dataclasses.asdict(self)}

    def digest(self) -> str:
        """SHA-256 of what the plan does, in hex (reasons and counts are left out)."""
        data = self.to_dict()
        for unit in data["units"]:
            del unit["why"], unit["num_params"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write as JSON; a file that was there is replaced whole or not at all."""
        target = Path(file)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        part.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        part.replace(target)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Plan:
        """Read a plan from JSON, or from TOML where the name ends in .toml.

        Raises:
            ShardfitError: the file can't be read, or isn't a plan; it says where.
        """
        source = Path(file)
        try:
            text = source.read_text(encoding="utf-8")
            data = tomllib.loads(text) if source.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise ShardfitError(
                "the plan can't be read", evidence=f"{source}: {error}", fix="give a JSON or TOML plan"
            ) from None
        return cls.from_dict(data, origin=str(source))

    @classmethod
    def from_dict(cls, data: Any, *, origin: str = "plan") -> Plan:
        """The inverse of `to_dict`; unknown or ill-typed fields are errors."""
        if not isinstance(data, dict):
            raise ShardfitError("a plan is a table", evidence=f"{origin}: {type(data).__name__}")
        data = dict(data)
        version = data.pop("version", PLAN_VERSION)
        if version != PLAN_VERSION:
            raise ShardfitError(
                "this plan was written by another version of shardfit",
                evidence=f"{origin}: version {version!r}, this one reads {PLAN_VERSION}",
                fix="make it again with plan_units",
            )
        units = data.pop("units", None)
        if not isinstance(units, list | tuple):
            raise ShardfitError("a plan needs a list of units", evidence=f"{origin}: units={units!r}")
        plan: Plan = _build(
            cls,
            {
                **data,
                "units": tuple(_build(Unit, unit, f"{origin}: units[{i}]") for i, unit in enumerate(units)),
                "mesh": _build(MeshShape, data.get("mesh", {}), f"{origin}: mesh"),
                "precision": _build(Precision, data.get("precision", {}), f"{origin}: precision"),
            },
            origin,
        )
        return plan

    def __str__(self) -> str:
        mesh, precision = self.mesh, self.precision
        lines = [
            f"plan: {len(self.units)} units, {sum(u.num_params for u in self.units):,} parameters, "
            f"mesh replicate={mesh.replicate} shard={mesh.shard or 'rest'} tensor={mesh.tensor}",
            f"  precision param={precision.param or 'as stored'} reduce={precision.reduce or 'as stored'} "
            f"master={precision.master or 'as built'}; offload={self.offload}; "
            f"checkpointing={self.checkpointing}; compile={self.compile}; prefetch={self.prefetch}",
        ]
        for unit in self.units:
            names = ", ".join(path or "(root)" for path in unit.paths)
            lines.append(f"  {names}  {unit.num_params:,}  reshard={unit.reshard}  {unit.why}")
        return "\n".join(lines)


def _names(what: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise ShardfitError(f"{what} are a list of strings", evidence=repr(names), fix='such as ["layers.0"]')


def _ancestors(path: str) -> list[str]:
    if not path:
        return []
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "paths": (list, tuple),
    "methods": (list, tuple),
    "why": (str,),
    "num_params": (int,),
    "reshard": (bool, int),
    "offload": (bool,),
    "compile": (bool,),
    "cast_inputs": (bool,),
    "prefetch": (int,),
}


def _build(kind: type[Any], data: Any, origin: str) -> Any:
    if not isinstance(data, dict):
        raise ShardfitError(f"{origin} is a table", evidence=f"{type(data).__name__}: {data!r}")
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(data) - known):
        raise ShardfitError(
            f"unknown field in {kind.__name__}",
            evidence=f"{origin}: {', '.join(unknown)}",
            fix=f"known are {', '.join(sorted(known))}",
        )
    for name, value in data.items():
        if (types := _FIELD_TYPES.get(name)) and not isinstance(value, types):
            raise ShardfitError(
                f"{name} has the wrong type",
                evidence=f"{origin}: {name}={value!r}",
                fix=f"expected {' or '.join(t.__name__ for t in types)}",
            )
    try:
        return kind(**data)
    except TypeError as error:
        raise ShardfitError(f"{origin} is not a {kind.__name__}", evidence=str(error)) from None
