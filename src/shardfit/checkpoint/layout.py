"""Layout: which folder holds which step, and which of them are whole.

    runs/a/                                 the checkpointer's folder
      step-00000100/                        committed: complete, never written again
      step-00000150.1/                      generation 1: saved after going back before step 200
      .step-00000200.saving-3f9c.../        unfinished: being written, or its writer died
      .step-00000050.deleting-77aa.../      on its way out

A folder gets its final name by one rename, after everything in it, the manifest last, has
reached the disk. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
_COMMITTED = re.compile(r"step-(\d+)(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d+(?:\.\d+)?\.(?:saving|deleting)-[0-9a-f]+")


@dataclass(frozen=True, order=True)
class Slot:
    """The place of one checkpoint in the order of a run: later ones compare greater.

    Attributes:
        generation: 0, and one more each time that the run went back and saved a step again,
            or an earlier one than the newest.
        step: the optimizer step after which it was saved.
    """

    generation: int
    step: int

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"step-{self.step:08d}" + (f".{self.generation}" if self.generation else "")


def parse_slot(name: str) -> Slot | None:
    """The slot that a folder's name stands for. None: it is no checkpoint's name."""
    match = _COMMITTED.fullmatch(name)
    slot = Slot(int(match[2] or 0), int(match[1])) if match else None
    return slot if slot is not None and slot.name == name else None


def list_named(folder: Path) -> list[Slot]:
    """All folders with a checkpoint's final name, oldest first."""
    return sorted(slot for name in _names(folder) if (slot := parse_slot(name)) is not None)


def list_committed(folder: Path) -> list[Slot]:
    """The committed checkpoints, oldest first: those of `list_named` that have a manifest."""
    return [slot for slot in list_named(folder) if (folder / slot.name / MANIFEST).is_file()]


def list_unfinished(folder: Path) -> list[str]:
    """Names of the folders that a save or a deletion has left half done."""
    return sorted(name for name in _names(folder) if _UNFINISHED.fullmatch(name))


def next_slot(named: Iterable[Slot], step: int) -> Slot:
    """The slot of a new checkpoint at `step`: greater than all that are there."""
    newest = max(named, default=Slot(0, -1))
    slot = Slot(newest.generation, step)
    return slot if slot > newest else Slot(newest.generation + 1, step)


def commit(folder: Path, name: str, slot: Slot) -> None:
    """Give the finished folder `name` its final name, and wait until the disk has that."""
    os.rename(folder / name, folder / slot.name)
    sync(folder)


def remove(folder: Path, slot: Slot) -> None:
    """Delete a committed checkpoint; a deletion that is cut short leaves none that looks whole."""
    gone = f".{slot.name}.deleting-{secrets.token_hex(6)}"
    os.rename(folder / slot.name, folder / gone)
    sync(folder)
    shutil.rmtree(folder / gone)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_file(file: Path, data: bytes) -> None:
    """Write a file whole or not at all, and wait until the disk has it."""
    part = file.with_name(f".{file.name}.part")
    with open(part, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, file)
    sync(file.parent)


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []
