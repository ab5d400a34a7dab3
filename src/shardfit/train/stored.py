"""Stored weights by name, of which any rows can be read: safetensors and torch.save files."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shardfit.errors import ShardfitError

# https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, then the data.
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class Stored(Protocol):
    """One tensor in a file. A tensor without dims has one row."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self, first: int, last: int) -> torch.Tensor:
        """Rows from `first` to `last` (not included), on the CPU."""

    def read_into(self, target: torch.Tensor, first: int) -> None:
        """Fill `target`, contiguous and of the same dtype on the CPU, with the rows from `first` on."""


def num_rows(entry: Stored) -> int:
    """Rows of a stored tensor."""
    return entry.shape[0] if entry.shape else 1


def row_bytes(entry: Stored) -> int:
    """Bytes of one of its rows."""
    return math.prod(entry.shape[1:]) * entry.dtype.itemsize


@dataclass(frozen=True)
class _InSafetensors:
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, first: int, last: int) -> torch.Tensor:
        rows = torch.empty((last - first, *self.shape[1:]) if self.shape else (), dtype=self.dtype)
        self.read_into(rows, first)
        return rows

    def read_into(self, target: torch.Tensor, first: int) -> None:
        if target.numel() == 0:
            return
        room = memoryview(target.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        at = self.offset + first * row_bytes(self)
        with self.file.open("rb", buffering=0) as stream:
            while room:
                count = os.preadv(stream.fileno(), [room], at)
                if count == 0:
                    raise ShardfitError("a weights file ends too early", evidence=f"{self.file} at byte {at}")
                room, at = room[count:], at + count


@dataclass(frozen=True)
class _InMemory:
    """A tensor of a torch.save file; where it is mapped, rows are read as they are touched."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, first: int, last: int) -> torch.Tensor:
        return self.tensor.detach()[first:last] if self.shape else self.tensor.detach()

    def read_into(self, target: torch.Tensor, first: int) -> None:
        target.copy_(self.read(first, first + (target.shape[0] if target.ndim else 1)))


def open_weights(source: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors in a file or folder, by name; only headers are read.

    Raises:
        ShardfitError: nothing there, a torn file, an unknown format, a name in two files.
    """
    path = Path(source)
    if not path.exists():
        raise ShardfitError(
            "there are no weights", evidence=str(path), fix="give a file or folder that is there"
        )
    if path.is_file():
        return dict(_open_file(path))
    stored: dict[str, Stored] = {}
    for file in _files_of(path):
        for name, entry in _open_file(file).items():
            if name in stored:
                raise ShardfitError(
                    "a tensor is in two files of the folder",
                    evidence=f"{name}, again in {file}",
                    fix="take files of an older save out of the folder, or give one file",
                )
            stored[name] = entry
    return stored


def _files_of(folder: Path) -> list[Path]:
    """The weight files of a folder: those that its index names, or all of one format."""
    for index in _INDEXES:
        if (folder / index).is_file():
            names = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
            if absent := [file.name for file in files if not file.is_file()]:
                raise ShardfitError(
                    "the index names files that are not there",
                    evidence=f"{folder / index}: {', '.join(absent)}",
                    fix="complete the download",
                )
            return files
    for suffixes in ((".safetensors",), _TORCH_SUFFIXES):
        if files := sorted(file for file in folder.iterdir() if file.suffix in suffixes):
            return files
    raise ShardfitError(
        "the folder has no weight files",
        evidence=str(folder),
        fix=f".safetensors, or files of torch.save ({', '.join(_TORCH_SUFFIXES)}); for a checkpoint of "
        "shardfit use Checkpointer or load_checkpoint",
    )


def _open_file(file: Path) -> Mapping[str, Stored]:
    if file.suffix == ".safetensors":
        return _open_safetensors(file)
    return {name: _InMemory(tensor) for name, tensor in _open_torch(file).items()}


def _open_safetensors(file: Path) -> dict[str, _InSafetensors]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found = {}
        end = 0
        for name, entry in header.items():
            dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
            first, last = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name}: {last - first} bytes for {list(shape)} of {dtype}")
            found[name] = _InSafetensors(file, 8 + length + first, shape, dtype)
            end = max(end, last)
        if 8 + length + end > size:
            raise ValueError(f"{size} bytes, {8 + length + end} expected")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ShardfitError(
            "the file is not a whole safetensors file", evidence=f"{file}: {error}", fix="get it again"
        ) from None
    return found


def _open_torch(file: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            content = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            content = torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ShardfitError(
            "the file can't be read as saved weights",
            evidence=f"{file}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            fix="save a state_dict of tensors with torch.save, or as safetensors",
        ) from None
    candidates = [content, *content.values()] if isinstance(content, dict) else []
    states: list[dict[str, torch.Tensor]] = [state for state in candidates if _is_state(state)]
    if len(states) != 1:
        raise ShardfitError(
            "the file has no state dict, or several",
            evidence=f"{file}: {sorted(map(str, content)) if isinstance(content, dict) else type(content)}",
            fix="save the one to be loaded by itself: torch.save(model.state_dict(), ...)",
        )
    return states[0]


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(v, torch.Tensor) for v in value.values())
    )
