"""Checkpoints that a script writes and reads, seen at the calls that do it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardfit.parity.recording import Save
from shardfit.parity.scratch import make_own

_WRITERS = (
    ("torch", "save", 1, "f"),
    ("torch.distributed.checkpoint", "save", None, "checkpoint_id"),
    ("torch.distributed.checkpoint", "async_save", None, "checkpoint_id"),
    ("safetensors.torch", "save_file", 1, "filename"),
)
_READERS = (
    ("torch", "load", 0, "f"),
    ("torch.distributed.checkpoint", "load", None, "checkpoint_id"),
    ("safetensors.torch", "load_file", 0, "filename"),
)


class Files:
    """The saves and reads of this process; of calls in each other only the outermost.

    Args:
        num_steps: gives the optimizer steps done so far.
        inside: the folder that was copied for the run; files elsewhere are noted. None: all are.
        is_active: False in forked children.
    """

    def __init__(
        self, *, num_steps: Callable[[], int], inside: Path | None, is_active: Callable[[], bool]
    ) -> None:
        self.saves: list[Save] = []
        self.save_files: list[str] = []
        self.reads: list[dict[str, Any]] = []
        self.on_save: Callable[[Save], None] = lambda save: None
        self._num_steps = num_steps
        self._inside = inside
        self._is_active = is_active
        self._depth = 0
        self._pending: list[Any] = []

    def install(self) -> None:
        for module, name, place, keyword in _WRITERS:
            self._wrap(module, name, place, keyword, is_write=True)
        for module, name, place, keyword in _READERS:
            self._wrap(module, name, place, keyword, is_write=False)
        from shardfit.checkpoint.checkpointer import Checkpointer

        self._wrap_method(Checkpointer, "save", is_write=True)
        self._wrap_method(Checkpointer, "resume", is_write=False)

    def settle(self) -> None:
        """Wait for saves that go on in the background."""
        for future in self._pending:
            with contextlib.suppress(Exception):
                future.result()
        self._pending.clear()

    def facts(self) -> dict[str, Any]:
        outside = [file for file in self.save_files if not self._is_inside(file)]
        return {"reads": self.reads, "save_files": self.save_files, "saved_outside": outside}

    def _is_inside(self, file: str) -> bool:
        return self._inside is None or not file or Path(file).resolve().is_relative_to(self._inside)

    def _wrap(self, module: str, name: str, place: int | None, keyword: str, *, is_write: bool) -> None:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            return
        try:
            owner = importlib.import_module(module)
            inner = getattr(owner, name)
        except (ImportError, AttributeError):
            return
        call = f"{module.replace('torch.distributed.checkpoint', 'dcp')}.{name}"

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            target = kwargs.get(keyword)
            if target is None and place is not None and len(args) > place:
                target = args[place]
            if target is None and place is None:
                target = kwargs.get("storage_writer") or kwargs.get("storage_reader") or ""
                target = getattr(target, "path", target)
            # In memory (a BytesIO): no checkpoint.
            counts = isinstance(target, str | os.PathLike) or isinstance(getattr(target, "name", None), str)
            return self._observe(inner, args, kwargs, call, target if counts else None, is_write)

        setattr(owner, name, wrapped)

    def _wrap_method(self, owner: type, name: str, *, is_write: bool) -> None:
        inner = getattr(owner, name)
        call = f"{owner.__name__}.{name}"

        @functools.wraps(inner)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self._observe(inner, (this, *args), kwargs, call, this.folder, is_write)

        setattr(owner, name, wrapped)

    def _observe(self, inner: Any, args: Any, kwargs: Any, call: str, target: Any, is_write: bool) -> Any:
        if target is None or self._depth or not self._is_active():
            return inner(*args, **kwargs)
        file = _name_of(target)
        if is_write and file and self._inside is not None:
            make_own(file, self._inside, keep=False)
        self._depth += 1
        try:
            result = inner(*args, **kwargs)
        finally:
            self._depth -= 1
        if is_write:
            save = Save(after_steps=self._num_steps(), call=call)
            if hasattr(result, "result"):
                self._pending.append(result)
            self.saves.append(save)
            self.save_files.append(file)
            self.on_save(save)
        elif result is not None or call == "dcp.load":
            self.reads.append({"call": call, "file": file, "after_steps": self._num_steps()})
        return result


def _name_of(target: Any) -> str:
    if isinstance(target, str | os.PathLike):
        return os.path.abspath(os.fspath(target))
    name = getattr(target, "name", "")
    return os.path.abspath(name) if isinstance(name, str) else ""
