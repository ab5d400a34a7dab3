"""Each private name of torch that `_torch.py` uses does what we take it to do."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import run_ranks

from shardfit import _torch


def time_out(ranks):
    groups = list(_torch.all_groups())
    assert dist.group.WORLD in groups
    assert all(_torch.set_group_timeout(group, 1.5) for group in groups)
    try:
        if ranks.rank == 0:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done{ranks.rank}", "")
        store.wait(["done0", "done1"], timedelta(seconds=30))
    return ""


def test_set_group_timeout_bounds_a_collective():
    assert "1500ms" in run_ranks(time_out)[0]


def test_in_backward_is_told_inside_a_backward_only():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(_torch.in_backward()))
    seen.append(_torch.in_backward())
    y.backward()
    seen.append(_torch.in_backward())
    assert seen == [False, True, False]


def test_hooks_and_attributes_of_parameters():
    p = torch.nn.Parameter(torch.ones(1))
    assert _torch.tensor_hooks(p) == []
    assert _torch.post_accumulate_grad_hooks(p) == []
    assert _torch.attributes_of(p) == {}
    p.register_hook(abs)
    p.register_post_accumulate_grad_hook(repr)
    p.decay = False
    assert _torch.tensor_hooks(p) == [abs]
    assert _torch.post_accumulate_grad_hooks(p) == [repr]
    assert _torch.attributes_of(p) == {"decay": False}


def test_has_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert _torch.has_values(torch.ones(1))
    assert not _torch.has_values(torch.ones(1, device="meta"))
    with FakeTensorMode():
        assert not _torch.has_values(torch.ones(1))


def test_no_dynamo_keeps_a_function_out_of_compilation():
    compiling = []

    @_torch.no_dynamo
    def outside(x):
        compiling.append(torch.compiler.is_compiling())
        return x

    torch.compile(lambda x: outside(x + 1) + 1, backend="eager")(torch.ones(1))
    assert compiling == [False]


def test_costly_operators_are_products_and_attention():
    found = {str(operator) for operator in _torch.costly_operators()}
    assert {"aten.mm.default", "aten.bmm.default", "aten.convolution.default"} <= found
    assert any("attention" in name for name in found)
