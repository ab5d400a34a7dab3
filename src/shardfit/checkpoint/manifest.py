"""Manifest: what a checkpoint holds, as a value. Standard library only.

`manifest.json` is written last: it is the mark of a committed checkpoint, and everything
else in the folder can be held against it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardfit.checkpoint.layout import MANIFEST, write_file
from shardfit.errors import ShardfitError

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class SavedFile:
    """A file of the checkpoint: name in its folder, size, SHA-256 in hex."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the checkpoint: its whole shape (not one rank's), and its dtype by name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: the step after which it was saved.
        world: number of ranks that wrote it.
        data_world: number of those with different data.
        mesh: sizes of the mesh axes by name; empty without a mesh.
        plan_digest: `Plan.digest()` of the plan in plan.json. None: no plan was applied.
        torch_version, shardfit_version: that wrote it.
        parts: what was given to the checkpointer ("model", "optimizer", "extra.ema", ...).
        tensors: "model." or "optimizer.state." and the parameter's name, and so on; by name.
        aliases: names of tied tensors, and the name under which each is stored.
        files: every file but the manifest, by name.
    """

    step: int
    world: int
    data_world: int
    torch_version: str
    shardfit_version: str
    mesh: dict[str, int] = field(default_factory=dict)
    plan_digest: str | None = None
    parts: tuple[str, ...] = ()
    tensors: tuple[SavedTensor, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    files: tuple[SavedFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> str:
        """The text of manifest.json. Its first line that differs from another's says much."""
        body = dataclasses.asdict(self)
        head = {"format": "shardfit-checkpoint", "version": MANIFEST_VERSION, "digest": _digest(body)}
        return json.dumps({**head, **body}, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write manifest.json whole or not at all, and wait until the disk has it."""
        write_file(folder / MANIFEST, self.to_json().encode())

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Manifest:
        """The manifest of the checkpoint in `folder`.

        Raises:
            ShardfitError: there is none (SF732), it is damaged (SF720), or of another version.
        """
        file = Path(folder) / MANIFEST
        try:
            text = file.read_bytes()
        except OSError as error:
            raise _unreadable(Path(folder), error) from None
        return cls.from_json(text, origin=str(file))

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = MANIFEST) -> Manifest:
        """The inverse of `to_json`."""
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            raise _damaged(origin, f"it is no JSON: {error}") from None
        if raw.pop("format", None) != "shardfit-checkpoint":
            raise ShardfitError(
                "this is not the manifest of a shardfit checkpoint",
                evidence=origin,
                fix="give a folder that Checkpointer has written",
            )
        if (version := raw.pop("version", None)) != MANIFEST_VERSION:
            raise ShardfitError(
                "this checkpoint was written by another version of shardfit",
                evidence=f"{origin}: format version {version!r}, this one reads {MANIFEST_VERSION}",
                fix="load it with the version of shardfit that wrote it",
            )
        digest = raw.pop("digest", None)
        if digest != _digest(raw):
            raise _damaged(origin, f"its digest is {_digest(raw)[:12]}..., it says {str(digest)[:12]}...")
        raw["parts"] = tuple(raw["parts"])
        raw["tensors"] = tuple(SavedTensor(t["name"], tuple(t["shape"]), t["dtype"]) for t in raw["tensors"])
        raw["files"] = tuple(SavedFile(**f) for f in raw["files"])
        return cls(**raw)


def measure_file(file: Path, *, name: str | None = None) -> SavedFile:
    """Size and digest of a file, as it is on the disk now."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return SavedFile(name or file.name, os.fstat(stream.fileno()).st_size, digest)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(origin: str, evidence: str) -> ShardfitError:
    return ShardfitError(
        "the manifest of this checkpoint is damaged",
        evidence=f"{origin}: {evidence}",
        fix="restore it from a copy, or resume from another checkpoint",
        code="SF720",
    )


def _unreadable(folder: Path, error: OSError) -> ShardfitError:
    if not folder.is_dir():
        return ShardfitError(
            "there is no checkpoint here",
            evidence=f"{folder} is {'a file' if folder.exists() else 'not there'}",
            fix="give a folder such as runs/a/step-00000100",
        )
    if isinstance(error, FileNotFoundError):
        return ShardfitError(
            "this folder holds no committed checkpoint",
            evidence=f"{folder} has no {MANIFEST}, which is written last",
            fix="its save did not end: resume from another checkpoint",
            code="SF732",
        )
    return ShardfitError("the manifest can't be read", evidence=str(error), fix="check its permissions")
