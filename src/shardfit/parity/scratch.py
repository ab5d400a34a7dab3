"""A copy of a script's folder to run it in, so that nothing of the user's is written to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardfit.errors import EXIT_USAGE, ShardfitError

_SKIPPED = frozenset(
    {".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", ".tox", ".idea", ".vscode"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
# Larger files are links; the recorder breaks a link before a checkpoint is written to it.
_LARGE_BYTES = 8 << 20
_MAX_ENTRIES = 20_000
_MAX_BYTES = 512 << 20


@dataclass(frozen=True)
class Scratch:
    """A script as it is run: in a copy.

    Attributes:
        root: the copied folder; nothing else is in it.
        script: in the copy.
        cwd: where the run starts; in the copy.
        argv: with paths into the original folder turned into paths into the copy.
        source: the folder that was copied.
    """

    root: Path
    script: Path
    cwd: Path
    argv: tuple[str, ...]
    source: Path

    def moved(self, root: Path) -> Scratch:
        """The same in another copy of `root`."""
        return Scratch(
            root=root,
            script=root / self.script.relative_to(self.root),
            cwd=root / self.cwd.relative_to(self.root),
            argv=tuple(_moved(arg, self.root, root, self.cwd) for arg in self.argv),
            source=self.source,
        )


def copy_for_run(
    script: str | os.PathLike[str], root: Path, *, argv: Iterable[str] = (), cwd: Path | None = None
) -> Scratch:
    """Copy the folder that the script needs to `root`, which must not exist.

    It is the working folder if the script is inside it, and the script's own otherwise. Caches,
    virtual environments and version control are left out, large files are linked.

    Args:
        script: as the user named it.
        argv: the script's arguments.
        cwd: None: the current one.

    Raises:
        ShardfitError: there is no such script.
    """
    here = Path(cwd or Path.cwd()).resolve()
    file = (here / script).resolve()
    if not file.is_file():
        raise ShardfitError(
            "there is no such script",
            evidence=str(script),
            fix="give the path of a Python file",
            exit_status=EXIT_USAGE,
        )
    is_home = here == Path.home().resolve() or here == Path(here.anchor)
    source = here if file.is_relative_to(here) and not is_home else file.parent
    copy_folder(source, root)
    start = root / here.relative_to(source) if here.is_relative_to(source) else root
    # Beyond the limits a folder may be a link; the script's own never is.
    target = root / file.relative_to(source)
    make_own(target, root, keep=True)
    return Scratch(
        root=root,
        script=target,
        cwd=start,
        argv=tuple(_moved(arg, source, root, here) for arg in argv),
        source=source,
    )


def copy_folder(source: Path, target: Path) -> None:
    """Copy a tree within limits: past them, and for large files, there are links in place of copies."""
    budget = _Budget()
    _copy(source, target, budget, {source.resolve()})


@dataclass
class _Budget:
    entries: int = 0
    num_bytes: int = 0

    @property
    def is_spent(self) -> bool:
        return self.entries >= _MAX_ENTRIES


def _copy(source: Path, target: Path, budget: _Budget, above: set[Path]) -> None:
    target.mkdir(parents=True)
    folders: list[os.DirEntry[str]] = []
    for entry in os.scandir(source):
        budget.entries += 1
        if entry.is_dir():
            folders.append(entry)
        elif entry.is_file():
            size = entry.stat().st_size
            if size > _LARGE_BYTES or budget.num_bytes + size > _MAX_BYTES:
                (target / entry.name).symlink_to(os.path.realpath(entry.path))
            else:
                shutil.copy2(entry.path, target / entry.name)
                budget.num_bytes += size
    for entry in folders:
        real = Path(entry.path).resolve()
        if entry.name in _SKIPPED or (real / "pyvenv.cfg").exists() or real in above:
            continue
        # Where the copy itself lies in the source: not into itself.
        if target.resolve().is_relative_to(real) or real == target.resolve():
            continue
        if budget.is_spent:
            (target / entry.name).symlink_to(real)
        else:
            _copy(Path(entry.path), target / entry.name, budget, above | {real})


def make_own(path: str | os.PathLike[str], root: Path, *, keep: bool) -> None:
    """Before `path`, inside the copy `root`, is written to: no link may lead the write to the user's files.

    Args:
        keep: the file's content is needed (it is changed, or added to).
    """
    full = Path(os.path.abspath(path))
    if not full.is_relative_to(root) or full == root:
        return
    place = root
    for part in full.relative_to(root).parts[:-1]:
        place = place / part
        if place.is_symlink():
            real = place.resolve()
            place.unlink()
            place.mkdir()
            for entry in os.scandir(real):
                (place / entry.name).symlink_to(entry.path)
    if full.is_symlink():
        target = full.resolve()
        full.unlink()
        if keep and target.exists():
            shutil.copy2(target, full)


def _moved(arg: str, source: Path, target: Path, here: Path) -> str:
    """An argument, or the value of --option=value: a path in `source` becomes one in `target`."""
    option, sep, value = arg.partition("=") if arg.startswith("-") else ("", "", arg)
    path = Path(value)
    if not value or "\0" in value:
        return arg
    full = Path(os.path.normpath(here / path))
    leaves = value.startswith("..") or not here.is_relative_to(source)
    if path.is_absolute() or (leaves and full.exists()):
        if full.is_relative_to(source):
            full = target / full.relative_to(source)
        return f"{option}{sep}{full}"
    return arg
