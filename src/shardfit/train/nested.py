"""Nested batches: tuples, lists, dicts, mappings and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors_in(item: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from tensors_in(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from tensors_in(getattr(item, field.name))


def map_nested(item: Any, cut: Callable[[Any], Any], rows: int) -> Any:
    """A copy of nested `item`, of the same types, with `cut` called on its tensors.

    `cut` is also called on lists and tuples of `rows` strings (`rows` 0: on none). Anything else
    is kept as it is.
    """
    if isinstance(item, Tensor):
        return cut(item)
    if isinstance(item, Mapping):
        values = {key: map_nested(value, cut, rows) for key, value in item.items()}
        if type(item) is dict or not isinstance(item, MutableMapping):
            return values
        changed = copy.copy(item)
        for key, value in values.items():
            changed[key] = value
        return changed
    if isinstance(item, list | tuple):
        if len(item) == rows and rows and all(isinstance(value, str | bytes) for value in item):
            return cut(item)
        parts = [map_nested(value, cut, rows) for value in item]
        if isinstance(item, list):
            return parts
        return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        changes = {
            field.name: map_nested(getattr(item, field.name), cut, rows) for field in dataclasses.fields(item)
        }
        return dataclasses.replace(item, **changes)
    return item
