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


def look_at_units(ranks):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy, reshard_after_forward=2)
    fully_shard(model)
    model.set_requires_gradient_sync(False, recurse=False)
    running = []
    model[0].register_forward_hook(lambda *_: running.append(_torch.is_in_fsdp_forward(model)))
    before = [unit.is_root for unit in _torch.fsdp_units(model)]
    model(torch.ones(1, 4)).sum().backward()
    running.append(_torch.is_in_fsdp_forward(model))
    units = [
        (u.path, len(u.params), u.reshard, u.param_dtype, u.reduce_dtype, u.mesh.size(), u.is_root, u.reduces)
        for u in _torch.fsdp_units(model)
    ]
    chunks = [_torch.chunk_of(parameter) for parameter in model.parameters()]
    return before, units, running, chunks, _torch.is_in_fsdp_forward(torch.nn.Linear(1, 1))


def test_fsdp_units_as_they_stand():
    results = run_ranks(look_at_units, world=4)
    for rank, (before, units, running, chunks, plain) in enumerate(results):
        assert before == [None, None]
        assert units == [
            ("", 2, False, None, None, 4, True, False),
            ("0", 2, 2, torch.bfloat16, torch.float32, 4, False, True),
        ]
        assert running == [True, False]
        assert plain is None
        # 6 rows in chunks of 2: the last rank has none.
        assert chunks[0] == ((min(2 * rank, 6), 0), (2 if rank < 3 else 0, 4))


def look_at_local_parts(ranks):
    from torch.distributed.tensor import DTensor, Shard

    part = torch.ones(2, 3)
    whole = DTensor.from_local(part, ranks.mesh, [Shard(0)])
    local = _torch.local_of(whole)
    is_own = local is _torch.local_of(whole) and local.data_ptr() == part.data_ptr()
    return is_own, _torch.local_of(part) is part


def test_local_of_is_the_tensor_itself():
    assert run_ranks(look_at_local_parts) == [(True, True)] * 2


def test_norms_and_products_of_many_tensors():
    tensors = [torch.full((3, 4), 2.0), torch.full((5,), -3.0)]
    norms = _torch.norms_of(tensors, 2.0, torch.float32)
    torch.testing.assert_close(torch.stack(norms), torch.tensor([48.0, 45.0]).sqrt())
    _torch.multiply_all(tensors, torch.tensor(0.5))
    _torch.multiply_all(tensors, 2.0)
    assert torch.equal(tensors[1], torch.full((5,), -3.0))


def test_fused_optimizers_skip_by_themselves():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    fused = torch.optim.AdamW([parameter], fused=True)
    assert _torch.skips_by_itself(fused)
    assert not _torch.skips_by_itself(torch.optim.AdamW([parameter]))
    fused.grad_scale, fused.found_inf = None, torch.tensor(1.0)
    fused.step()
    assert torch.equal(parameter, torch.ones(3))


def test_arguments_of_operators():
    operator = torch.ops.aten.bernoulli_.float
    assert _torch.argument_names(operator)[:2] == ["self", "p"]
    assert _torch.written_arguments(operator) == ["self"]
    assert _torch.written_arguments(torch.ops.aten.rand_like.default) == []
    seen = []

    class Watch(_torch.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.nn.functional.dropout(torch.ones(3), 0.5)
    assert operator in seen


def test_trees_of_arguments():
    tree = ((1, [2, 3]), {"a": 4})
    assert _torch.tree_leaves(tree) == [1, 2, 3, 4]
    assert _torch.tree_map(lambda leaf: -leaf, tree) == ((-1, [-2, -3]), {"a": -4})
