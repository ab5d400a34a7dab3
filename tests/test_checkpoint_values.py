"""Python state as JSON, and back with every type as it was."""

from __future__ import annotations

import collections
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from shardfit import ShardfitError
from shardfit.checkpoint.values import decode, encode

PLAIN = [
    None,
    True,
    -3,
    10**40,
    0.1,
    5e-324,
    -0.0,
    math.inf,
    "text \u00e9 \U0001f600 \n",
    "",
    [],
    {},
    [None],
    [[], {}, ()],
    (1, (2,)),
    {1: "a", (2, 3): "b", None: "c", "d": 1.5},
    {"!tensor": 1, "plain": 2},
    {"a": {"b": {"c": [1, {"d": ()}]}}},
    {1, 2},
    frozenset({"a"}),
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.Counter({3: 2, 8: 1}),
    collections.deque([1, 2], maxlen=5),
    b"\x00\xff",
    1 + 2j,
    random.Random(0).getstate(),
    np.random.default_rng(0).bit_generator.state,
]


def through_json(value):
    return decode(json.loads(json.dumps(encode(value, "it"))))


def assert_alike(one, other):
    assert type(one) is type(other)
    if isinstance(one, collections.deque):
        assert one.maxlen == other.maxlen
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, list | tuple | collections.deque):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right)
    else:
        assert repr(one) == repr(other)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30])
def test_plain_values(value):
    assert_alike(value, through_json(value))


def test_nan():
    assert math.isnan(through_json([math.nan])[0])


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.float64(0.1),
    np.int32(-3),
    np.bool_(True),
    np.zeros((0, 2), dtype=np.float16),
    np.array(2.5),
    np.arange(6, dtype=">i4").reshape(2, 3).T,
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_arrays(array):
    back = through_json({"a": (array,)})["a"][0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int64]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)], ids=str)
def test_tensors(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype) if shape else torch.ones((), dtype=dtype)
    for given in (tensor, tensor.t() if len(shape) == 2 else tensor):
        back = through_json([given])[0]
        assert back.dtype == dtype
        assert back.shape == given.shape
        # compared as bytes: not all dtypes have ==
        assert back.flatten().view(torch.uint8).equal(given.contiguous().flatten().view(torch.uint8))
        back.zero_()  # it has memory of its own


def test_numpy_and_python_generators_continue():
    for state, restore, draw in (
        (np.random.get_state, np.random.set_state, lambda: np.random.standard_normal(3).tolist()),
        (random.getstate, random.setstate, lambda: [random.gauss(0, 1) for _ in range(3)]),
    ):
        draw()
        saved = through_json(state())
        expected = draw()
        restore(saved)
        assert draw() == expected


def test_tensors_can_be_put_elsewhere():
    put = {}

    def store(path, tensor):
        if tensor.ndim == 0:
            return None
        put[path] = tensor
        return {"!stored": path}

    value = {"a": [torch.ones(2), torch.tensor(3.0)], "b": {"c": (torch.zeros(1),)}}
    coded = json.loads(json.dumps(encode(value, "x", store)))
    assert put.keys() == {"x.a.0", "x.b.c.0"}
    back = decode(coded, lambda reference: put[reference["!stored"]])
    assert back["a"][0] is value["a"][0]
    assert back["a"][1].item() == 3.0
    assert back["b"]["c"][0] is value["b"]["c"][0]


class Plain:
    pass


@pytest.mark.parametrize(
    "value",
    [Plain(), print, lambda: 0, nn.Linear(1, 1), np.array([Plain()]), Plain, torch.float32, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_would_need_code_is_refused_by_name(value):
    with pytest.raises(ShardfitError, match=r"scheduler\.lambdas\.1"):
        encode({"lambdas": [None, value]}, "scheduler")


def test_a_subclass_is_not_taken_for_its_base():
    class Loud(dict):
        pass

    with pytest.raises(ShardfitError, match="Loud"):
        encode(Loud(), "x")


def test_a_kind_that_is_not_known():
    with pytest.raises(ShardfitError, match="!exec"):
        decode({"!exec": "rm"})
