"""Values: Python state as JSON, and back with every type as it was.

Reading it runs no code, whoever wrote it, and it can be read without torch. What JSON has no
form for is an object with one key that begins with "!": tuples, sets, bytes, dictionaries
with keys other than strings, NumPy arrays, tensors.
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable
from typing import Any

from shardfit.errors import ShardfitError

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "!tuple": tuple,
    "!set": set,
    "!frozenset": frozenset,
}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "!dict": dict,
    "!ordered": collections.OrderedDict,
    "!counter": lambda pairs: collections.Counter(dict(pairs)),
}
_KINDS: dict[type, str] = {
    tuple: "!tuple",
    set: "!set",
    frozenset: "!frozenset",
    dict: "!dict",
    collections.OrderedDict: "!ordered",
    collections.Counter: "!counter",
}


def encode(value: Any, path: str, put: Callable[[str, Any], Any] | None = None) -> Any:
    """`value` as what `json.dumps` takes.

    Args:
        value: None, bool, int, float, str, bytes, complex, list, tuple, dict, OrderedDict,
            Counter, deque, set, frozenset, NumPy arrays and scalars, tensors, of any depth.
        path: its name, for errors and for `put`.
        put: called with the path of a tensor and the tensor; returns what stands for it.
            None, or where it returns None: the tensor's bytes are part of the JSON.

    Raises:
        ShardfitError: a value of another type; it says which and where.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [encode(item, f"{path}.{i}", put) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("!") for key in value):
        return {key: encode(item, f"{path}.{key}", put) for key, item in value.items()}
    if kind in (dict, collections.OrderedDict, collections.Counter):
        pairs = [[encode(key, path), encode(item, f"{path}.{key}", put)] for key, item in value.items()]
        return {_KINDS[kind]: pairs}
    if kind in _KINDS:
        return {_KINDS[kind]: [encode(item, f"{path}.{i}", put) for i, item in enumerate(value)]}
    if kind is collections.deque:
        return {"!deque": [value.maxlen, [encode(item, f"{path}.{i}", put) for i, item in enumerate(value)]]}
    if kind in (bytes, bytearray):
        return {"!bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"!complex": [value.real, value.imag]}
    if (coded := _encode_array(value, path, put)) is not None:
        return coded
    raise ShardfitError(
        "this state can't be stored as data",
        evidence=f"{path} is a {kind.__module__}.{kind.__qualname__}",
        fix="state_dict() may hold numbers, strings, bytes, containers, arrays and tensors; "
        "leave the object out and build it again",
    )


def decode(value: Any, get: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The inverse of `encode`; `get` makes the tensor of what `put` returned."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("!"):
        return {name: decode(item, get) for name, item in value.items()}
    body = value[key]
    if key in _SEQUENCES:
        return _SEQUENCES[key]([decode(item, get) for item in body])
    if key in _MAPPINGS:
        return _MAPPINGS[key]([(decode(name, get), decode(item, get)) for name, item in body])
    if key == "!deque":
        return collections.deque([decode(item, get) for item in body[1]], body[0])
    if key == "!bytes":
        return base64.b64decode(body)
    if key == "!complex":
        return complex(*body)
    if key in ("!array", "!number"):
        return _decode_array(key, *body)
    if key == "!tensor":
        return _decode_tensor(*body)
    if get is None:
        raise ShardfitError("this state holds a value of an unknown kind", evidence=key)
    return get(value)


def _encode_array(value: Any, path: str, put: Callable[[str, Any], Any] | None) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        key = "!array" if isinstance(value, np.ndarray) else "!number"
        return {key: [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if not isinstance(value, torch.Tensor):
        return None
    if put is not None and (coded := put(path, value)) is not None:
        return coded
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        return None
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return {"!tensor": [dtype_name(value.dtype), list(value.shape), base64.b64encode(data).decode()]}


def _decode_array(key: str, dtype: str, shape: list[int], data: str) -> Any:
    import numpy as np

    array = np.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(shape)
    return array[()] if key == "!number" else array


def _decode_tensor(dtype: str, shape: list[int], data: str) -> Any:
    import torch

    kind = getattr(torch, dtype)
    raw = bytearray(base64.b64decode(data))
    return torch.frombuffer(raw, dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)


def dtype_name(dtype: Any) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
