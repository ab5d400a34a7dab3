"""Verify: hold the files of a checkpoint against its manifest. No torch, no process group."""

from __future__ import annotations

import os
from pathlib import Path

from shardfit.checkpoint.layout import MANIFEST
from shardfit.checkpoint.manifest import Manifest, SavedFile, measure_file
from shardfit.errors import ShardfitError
from shardfit.findings import Finding, Report, Where
from shardfit.rules import RULES


def verify(folder: str | os.PathLike[str]) -> Report:
    """Is the checkpoint in `folder` whole? Reads every byte of it."""
    place = Path(folder)
    try:
        manifest = Manifest.read(place)
    except ShardfitError as error:
        found: tuple[Finding, ...] = ()
        if error.code is not None:
            where = Where(file=str(place / MANIFEST))
            found = (RULES[error.code].finding(message=error.what, evidence=error.evidence, where=where),)
        looked = () if found else (str(error),)
        return Report(
            tool="verify", subject=str(place), findings=found, looked_at=looked, completed=bool(found)
        )
    return Report(
        tool="verify",
        subject=str(place),
        findings=tuple(find_damage(place, manifest.files)),
        looked_at=(f"{len(manifest.files)} files, {manifest.size_bytes:,} bytes: size and SHA-256 of each",),
        data={"step": manifest.step, "world": manifest.world, "num_tensors": len(manifest.tensors)},
    )


def find_damage(
    folder: Path, files: tuple[SavedFile, ...] | list[SavedFile], *, digests: bool = True
) -> list[Finding]:
    """Those of `files` that are missing, torn or altered.

    Args:
        digests: compare the content too, not only sizes.
    """
    return [
        RULES["SF720"].finding(
            message="a file of the checkpoint is not as it was saved",
            evidence=f"{file.name}: {damage}",
            where=Where(file=str(folder / file.name)),
        )
        for file in files
        if (damage := _damage(folder, file, digests))
    ]


def _damage(folder: Path, file: SavedFile, digests: bool) -> str:
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"{size:,} bytes, saved with {file.size_bytes:,}"
        if digests and (digest := measure_file(path).digest) != file.digest:
            return f"its content has changed (SHA-256 {digest[:12]}..., saved with {file.digest[:12]}...)"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"can't be read: {error}"
    return ""
