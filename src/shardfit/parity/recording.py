"""What the recorder writes of a run, and what the comparison reads. No torch.

One folder a run: `rank-R.json` (a `RankRecord`) for each rank, and `weights-R.pt`
(`torch.save` of {parameter name: this rank's part}, plain tensors on the CPU).
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Ending = Literal["finished", "stopped", "error", "hang"]
Spread = Literal["whole", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a parameter this rank holds.

    Attributes:
        name: as the original would call it: wrappers' prefixes are taken off.
        shape: of the whole parameter.
        dtype: of the stored parameter, e.g. "float32".
        spread: "whole" on each rank, or "sharded" (a DTensor that some axis divides).
        offset, extent: where in the whole this rank's part begins, and its shape.
        trainable: has requires_grad.
        in_model: a module of the script holds it. False: the optimizer was given a tensor
            that no module has (any more).
        in_optimizer: in how many of the optimizers' groups it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spread: Spread
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    trainable: bool = True
    in_model: bool = True
    in_optimizer: int = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step (all optimizers that stepped since the last one of the first).

    Attributes:
        index: from 0 within this process; `RankRecord.first_step` places it in the run.
        losses: values given to backward since the last step, in order, with a GradScaler's
            scale taken off. Their sum, averaged over the data ranks, is what the step descends.
        squares: by parameter name, the sum of squares (accumulated in float64) of this rank's part of the
            gradient, as it was after the last backward: before clipping, with a scaler's scale
            taken off. A parameter without a gradient is left out.
        lr: of each parameter group, as the step used it.
        inputs: a digest of the tensors given to each root forward since the last step.
        rows: the sizes of their first dimension.
        weights: digest of this rank's parts after the step, for drift of replicas; by name,
            only for parts that are "whole".
        seconds: since the last step (or the start).
    """

    index: int
    losses: tuple[float, ...]
    squares: dict[str, float]
    lr: tuple[float, ...]
    inputs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    weights: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint that the script wrote: after how many steps, and through which call."""

    after_steps: int
    call: str


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """All that one rank of one run left.

    Attributes:
        first_step: optimizer steps that the run had done before this process (a resume).
        data_world: ranks that get different data; data_rank: this one's place among them.
        facts: what was seen of FSDP2 on live objects, by name, JSON-able. The recorder's
            docstring lists them ("root_sharded", "reduce_dtypes", "forward_called_directly", ...).
        saves: in order.
        ended: "finished" by itself, "stopped" by the recorder, "error", or "hang".
        error: the last line of the exception; trace: all of it.
        stacks: of all threads, where the rank hung.
        peak_bytes: peak resident memory; peak_device_bytes: peak allocated on CUDA, 0 without.
    """

    script: str
    argv: tuple[str, ...]
    rank: int
    world: int
    data_rank: int
    data_world: int
    torch_version: str
    device: str
    ended: Ending
    first_step: int = 0
    steps: tuple[Step, ...] = ()
    parts: tuple[Part, ...] = ()
    saves: tuple[Save, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    trace: str = ""
    stacks: str = ""
    peak_bytes: int = 0
    peak_device_bytes: int = 0

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write `rank-R.json`, whole or not at all."""
        target = Path(folder) / f"rank-{self.rank}.json"
        part = target.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        part.replace(target)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The records of all ranks of a run, by rank, and the folder with their weights."""

    folder: str
    ranks: tuple[RankRecord, ...]
    seconds: float = 0.0

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Recording:
        files = sorted(Path(folder).glob("rank-*.json"), key=lambda f: int(f.stem.split("-")[1]))
        return cls(folder=str(folder), ranks=tuple(_rank_record(json.loads(f.read_text())) for f in files))

    @property
    def num_steps(self) -> int:
        """Steps that every rank has done."""
        return min((len(r.steps) for r in self.ranks), default=0)


def _rank_record(raw: dict[str, Any]) -> RankRecord:
    raw["argv"] = tuple(raw["argv"])
    raw["steps"] = tuple(
        Step(**{**s, **{k: tuple(s[k]) for k in ("losses", "lr", "inputs", "rows")}}) for s in raw["steps"]
    )
    raw["parts"] = tuple(
        Part(**{**p, **{k: tuple(p[k]) for k in ("shape", "offset", "extent")}}) for p in raw["parts"]
    )
    raw["saves"] = tuple(Save(**s) for s in raw["saves"])
    return RankRecord(**raw)
