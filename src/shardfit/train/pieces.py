"""The pieces of a model that become units: cut at its blocks, untied, joined where small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from shardfit.plan import Unit
from shardfit.train.structure import (
    Structure,
    directly_read,
    find_blocks,
    is_called,
    is_embedding,
    is_leaf,
    sequences,
    signature,
)

# A collective pays for itself from about this many elements on (4 MB in fp32).
MIN_UNIT_NUMEL = 2**20
# ... but a unit never has to be more than this part of the model.
MIN_UNIT_FRACTION = 1 / 16
# A module without repeated blocks that holds more than this part is divided further.
DIVIDE_FRACTION = 1 / 4

# Before torch 2.13 a unit of which only some modules have run stays gathered, and goes stale.
CAN_RUN_IN_PART = hasattr(FSDPModule, "reset_iter_state")

# Begins the name of a sequence whose pieces have to be one unit.
_TOGETHER = "together, "


@dataclass(frozen=True)
class _Piece:
    """A module that may become a unit, or part of one.

    `sequence` names the run of siblings that it belongs to ("" for none); `chained` says
    that each of them feeds the next, as in a Sequential or a stack of blocks.
    """

    path: str
    numel: int
    is_block: bool
    is_embedding: bool
    sequence: str
    chained: bool


def units_by_structure(structure: Structure) -> list[Unit]:
    """Units for all of a model, the root last; not yet ordered by what is inside what."""
    smallest = max(1, min(MIN_UNIT_NUMEL, int(structure.numel * MIN_UNIT_FRACTION)))
    blocks = find_blocks(structure)
    pieces = _cut(structure, blocks)
    shared = _shared_units(structure, pieces)
    pieces, to_root = _untie(structure, pieces, {path for unit in shared for path in unit.paths})
    units, small = _join(structure, pieces, smallest)
    to_root += small
    if len(units) == 1 and not shared and structure.numel_of(units[0].paths) == structure.numel:
        units, to_root = [], ["the whole model is one unit"]
    root = Unit(paths=("",), reshard=False, why="; ".join(to_root) or "what is left")
    return [*shared, *units, root]


def _cut(structure: Structure, blocks: set[str]) -> list[_Piece]:
    """Cut the model into pieces, in order of registration: blocks, and modules outside them."""
    divide = structure.numel * DIVIDE_FRACTION
    pieces: list[_Piece] = []
    seen: set[int] = set()

    def visit(path: str) -> None:
        module = structure.modules[path]
        run_of = {child: run for run in sequences(structure, path) for child in run.paths}
        for child in structure.children(path):
            inner = structure.modules[child]
            numel = structure.numel_of([child])
            if numel == 0 or id(inner) in seen:
                continue
            holds_blocks = any(block.startswith(child + ".") for block in blocks)
            can_divide = not is_leaf(inner) and not directly_read(inner)
            if child not in blocks and (
                holds_blocks or not is_called(inner) or (can_divide and numel > divide)
            ):
                visit(child)
                continue
            seen.add(id(inner))
            run = run_of.get(child)
            pieces.append(
                _Piece(
                    path=child,
                    numel=numel,
                    is_block=child in blocks,
                    is_embedding=is_embedding(inner),
                    sequence=run.name if run else "",
                    chained=isinstance(module, nn.Sequential) or child in blocks,
                )
            )

    visit("")
    return _mark_alternatives(structure, pieces)


def _mark_alternatives(structure: Structure, pieces: list[_Piece]) -> list[_Piece]:
    """Make siblings that are alike, but no sequence, one run.

    They may be alternatives (a head for each task). As units of their own, ranks that choose
    different ones would mix their weights without an error: gathers of equal size pair up.
    """
    alike: dict[tuple[Any, ...], list[_Piece]] = {}
    for piece in pieces:
        if not piece.sequence and not piece.is_block:
            parent = piece.path.rpartition(".")[0]
            alike.setdefault((parent, signature(structure.modules[piece.path])), []).append(piece)
    runs = {
        piece.path: f"{_TOGETHER}alike: {group[0].path}"
        for group in alike.values()
        if len(group) > 1
        for piece in group
    }
    return [replace(piece, sequence=runs.get(piece.path, piece.sequence)) for piece in pieces]


def _shared_units(structure: Structure, pieces: Sequence[_Piece]) -> list[Unit]:
    """A module that occurs inside several pieces needs a unit of its own."""
    homes: dict[int, list[str]] = {}
    places: dict[int, str] = {}
    for piece in pieces:
        for path, module in structure.inside(piece.path):
            homes.setdefault(id(module), []).append(piece.path)
            places.setdefault(id(module), path)
    shared = [
        places[key]
        for key, found in homes.items()
        if len(set(found)) > 1
        and structure.numel_of([places[key]])
        and is_called(structure.modules[places[key]])
    ]
    outermost = [path for path in shared if not any(path.startswith(other + ".") for other in shared)]
    return [
        Unit(paths=(path,), why=f"shared by {len(set(homes[id(structure.modules[path])]))} modules")
        for path in outermost
    ]


def _untie(structure: Structure, pieces: list[_Piece], apart: set[str]) -> tuple[list[_Piece], list[str]]:
    """Leave to the root what it must hold, and join blocks that share a parameter.

    Returns the pieces that are left (joined ones have one `sequence` of their own, see
    `_join`) and reasons for the root.
    """
    own_of_shared = {id(p) for path in apart for p in structure.modules[path].parameters()}
    users: dict[int, list[str]] = {}
    for piece in pieces:
        for parameter in structure.modules[piece.path].parameters():
            users.setdefault(id(parameter), []).append(piece.path)
    held_outside = {id(p) for p in structure.outside([piece.path for piece in pieces])}
    reasons: dict[str, str] = {}
    joined: dict[str, str] = {}
    kinds = {piece.path: piece.is_block for piece in pieces}
    for key, paths in users.items():
        if key in own_of_shared or (len(paths) == 1 and key not in held_outside):
            continue
        if key not in held_outside and all(kinds[path] for path in paths):
            names = {joined.get(path, path) for path in paths}
            first = min(names, key=list(kinds).index)
            joined |= {path: first for path in kinds if joined.get(path, path) in names}
        else:
            reasons |= dict.fromkeys(paths, "tied")
    for reader, path in _direct_reads(structure):
        for piece in pieces:
            if _within(path, piece.path) and not _within(reader, piece.path):
                reasons.setdefault(piece.path, f"read by the forward of {reader or 'the root'}")
    left = [
        replace(piece, sequence=f"{_TOGETHER}tied: {joined[piece.path]}") if piece.path in joined else piece
        for piece in pieces
        if piece.path not in reasons
    ]
    words = [
        f"{', '.join(path for path, why in reasons.items() if why == reason)} ({reason})"
        for reason in dict.fromkeys(reasons.values())
    ]
    return left, words


def _direct_reads(structure: Structure) -> list[tuple[str, str]]:
    """(reader, read): modules whose forward reads another module's parameters without calling it."""
    return [
        (path, structure.first_path(full))
        for path, module in structure.modules.items()
        for relative in sorted(directly_read(module))
        if (full := f"{path}.{relative}" if path else relative) in structure.all_modules
    ]


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")


def _join(structure: Structure, pieces: list[_Piece], smallest: int) -> tuple[list[Unit], list[str]]:
    """Units from pieces; small neighbours are joined. Returns also what is left to the root."""
    tail = _tail(pieces, smallest)
    units: list[tuple[int, Unit]] = []
    small: list[str] = []
    runs: dict[str, list[tuple[int, _Piece]]] = {}
    for index, piece in enumerate(pieces):
        if piece in tail:
            continue
        if piece.sequence:
            runs.setdefault(piece.sequence, []).append((index, piece))
        elif piece.is_block or piece.numel >= smallest:
            units.append((index, Unit(paths=(piece.path,), why=_why(structure, piece))))
        else:
            small.append(piece.path)
    for name, run in runs.items():
        for group in _groups(run, smallest, whole=name.startswith(_TOGETHER)):
            members = [piece for _, piece in group]
            paths = tuple(piece.path for piece in members)
            if structure.numel_of(paths) < smallest and not any(piece.is_block for piece in members):
                small += paths
                continue
            # In backward a joined unit is gathered when the gradient of its last member's output
            # comes, so one whose members may not be a chain has to stay gathered.
            chained = all(piece.chained for piece in members) or all(p.is_embedding for p in members)
            why = _why(structure, members[0])
            if len(members) > 1:
                because = name.removeprefix(_TOGETHER).partition(":")[0]
                because = because if name.startswith(_TOGETHER) else "small"
                why = f"{len(members)} x {why}, together: {because}"
            unit = Unit(paths=paths, reshard=len(members) == 1 or chained, why=why)
            units.append((group[0][0], unit))
    ordered = [unit for _, unit in sorted(units, key=lambda item: item[0])]
    if tail:
        ordered.append(
            Unit(
                paths=tuple(piece.path for piece in tail),
                reshard=False,
                why="after the last block; kept gathered, backward needs it at once",
            )
        )
    return ordered, [f"{_few(small)} (small)"] if small else []


def _tail(pieces: Sequence[_Piece], smallest: int) -> list[_Piece]:
    """[norm, head]: the last large module after the blocks, and the small ones right before it."""
    last = max((i for i, piece in enumerate(pieces) if piece.is_block), default=None)
    if last is None:
        return []
    after = [piece for piece in pieces[last + 1 :] if not piece.is_embedding and not piece.sequence]
    if not after or after[-1].numel < smallest:
        return []
    start = len(after) - 1
    while CAN_RUN_IN_PART and start > 0 and after[start - 1].numel < smallest:
        start -= 1
    return after[start:]


def _groups(run: list[tuple[int, _Piece]], smallest: int, *, whole: bool) -> list[list[tuple[int, _Piece]]]:
    """Neighbours joined until each group has `smallest` elements; a short rest joins the last."""
    if whole:
        return [run]
    groups: list[list[tuple[int, _Piece]]] = [[]]
    for item in run:
        if groups[-1] and sum(piece.numel for _, piece in groups[-1]) >= smallest:
            groups.append([])
        groups[-1].append(item)
    if len(groups) > 1 and sum(piece.numel for _, piece in groups[-1]) < smallest:
        rest = groups.pop()
        groups[-1] += rest
    return groups


def _why(structure: Structure, piece: _Piece) -> str:
    name = type(structure.modules[piece.path]).__name__
    if piece.is_block:
        return f"repeated block {name}"
    return f"embedding {name}" if piece.is_embedding else f"large {name}"


def _few(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
