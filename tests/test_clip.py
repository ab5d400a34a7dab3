"""The whole gradient's norm, over meshes of all kinds, and clipping by it."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import run_ranks
from shardfit import ShardfitError
from shardfit.train.clip import clip_grad_norm_, grad_norm

NORM_TYPES = (2.0, 1.0, 3.0, math.inf)


def build(ranks=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3, bias=False), nn.LayerNorm(3))
    if ranks is None:
        return model
    if "tensor" in (ranks.mesh.mesh_dim_names or ()):
        parallelize_module(model, ranks.mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model[0], mesh=ranks.data_mesh)
    return fully_shard(model, mesh=ranks.data_mesh)


def make_gradients(model):
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    model(rows).square().sum().mul(50).backward()


def whole_gradients(model):
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def count_collectives():
    return mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)


def clipped(ranks):
    results = []
    for norm_type in NORM_TYPES:
        model = build(ranks)
        make_gradients(model)
        with count_collectives() as counted:
            norm = clip_grad_norm_(model, 1.5, norm_type)
        assert type(norm) is torch.Tensor
        assert norm.ndim == 0
        results.append((f"{norm:.3f}", norm.item(), whole_gradients(model), counted.call_count))
    return results


@pytest.mark.parametrize(
    ("world", "axes", "num_collectives"),
    [
        (1, {}, 0),
        (2, {}, 1),
        (4, {"replicate": 2}, 1),
        (4, {"tensor": 2}, 1),
    ],
)
def test_same_norm_and_gradients_as_one_process(world, axes, num_collectives):
    by_rank = run_ranks(clipped, world=world, init=axes)
    for index, norm_type in enumerate(NORM_TYPES):
        model = build()
        make_gradients(model)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5, norm_type).item()
        for results in by_rank:
            text, norm, gradients, num = results[index]
            assert norm == by_rank[0][index][1], "the ranks must agree to the bit"
            assert norm == pytest.approx(expected, rel=1e-6)
            assert text == f"{norm:.3f}"
            assert num == num_collectives
            for mine, theirs in zip(gradients, (p.grad for p in model.parameters()), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-6)


def on_several_meshes(ranks):
    """Experts: parameters on a flat mesh, on one axis of a square one, on both, and plain ones."""
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    layouts = [
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(1)]),
        (square, [Replicate(), Replicate()]),
    ]
    parameters = [nn.Parameter(torch.zeros_like(whole))]
    parameters[0].grad = whole.clone()
    for mesh, placements in layouts:
        local = whole
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                local = local.chunk(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
        grad = DTensor.from_local(local.contiguous(), mesh, placements, run_check=False)
        parameter = nn.Parameter(grad.detach().clone())
        parameter.grad = grad
        parameters.append(parameter)
    return [grad_norm(parameters, norm_type).item() for norm_type in NORM_TYPES]


def test_parameters_on_different_meshes_count_once():
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)).repeat(5, 1)
    expected = [torch.linalg.vector_norm(whole.double(), p).item() for p in NORM_TYPES]
    for norms in run_ranks(on_several_meshes, world=4):
        assert norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(1500, 1531), (3_000_001,), (2, 3), (40, 512, 16)])
def test_norm_of_large_tensors_against_float64(shape):
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 1e-3
    right = torch.linalg.vector_norm(parameter.grad.double()).item()
    assert grad_norm(parameter).item() == pytest.approx(right, rel=1e-6)


def test_strided_and_low_precision_gradients():
    parameters = [
        nn.Parameter(torch.zeros(300, 200)),
        nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16)),
    ]
    parameters[0].grad = torch.randn(200, 300).t()
    parameters[1].grad = torch.randn(70_000).bfloat16()
    right = sum(p.grad.double().square().sum() for p in parameters).sqrt()
    assert grad_norm(parameters).item() == pytest.approx(right.item(), rel=1e-6)


def test_gradients_within_the_limit_are_left_alone():
    model = build()
    make_gradients(model)
    before = [p.grad.clone() for p in model.parameters()]
    norm = clip_grad_norm_(model.parameters(), 1e9)
    assert norm > 0
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


def test_no_gradients():
    assert clip_grad_norm_(build(), 1.0).item() == 0.0


def test_not_finite():
    model = build()
    make_gradients(model)
    model[0].bias.grad[0] = math.nan
    with pytest.raises(ShardfitError, match="not finite"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(clip_grad_norm_(model, 1.0))


def not_finite_on_one_rank(ranks):
    model = build(ranks)
    make_gradients(model)
    if ranks.rank == 1:
        model[0].weight.grad.to_local()[0, 0] = math.inf
    return grad_norm(model).item()


def test_one_rank_s_overflow_is_seen_by_all():
    assert run_ranks(not_finite_on_one_rank) == [math.inf, math.inf]
