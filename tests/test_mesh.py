"""Meshes by name, with real ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ranks import run_ranks
from shardfit import MeshShape, ShardfitError, make_mesh
from shardfit.train.mesh import mesh_shape


def places(ranks):
    return (
        ranks.mesh.mesh_dim_names,
        tuple(ranks.mesh.shape),
        ranks.data_rank,
        ranks.data_world,
        ranks.data_mesh.mesh_dim_names,
        mesh_shape(ranks.mesh),
    )


def test_one_axis_by_default():
    results = run_ranks(places, world=4)
    assert [r[2] for r in results] == [0, 1, 2, 3]
    assert results[0][0] == ("shard",)
    assert results[0][5] == MeshShape(replicate=1, shard=4, tensor=1)


def test_hsdp():
    results = run_ranks(places, world=4, init={"replicate": 2})
    assert results[0][:2] == (("replicate", "shard"), (2, 2))
    assert [r[2] for r in results] == [0, 1, 2, 3]
    assert results[0][3] == 4


def test_tensor_ranks_share_their_data():
    results = run_ranks(places, world=4, init={"tensor": 2})
    assert results[0][:2] == (("shard", "tensor"), (2, 2))
    assert [r[2] for r in results] == [0, 0, 1, 1]
    assert results[0][3:5] == (2, ("shard",))


def test_all_three_axes():
    results = run_ranks(places, world=4, init={"replicate": 2, "tensor": 2})
    assert results[0][:2] == (("replicate", "shard", "tensor"), (2, 1, 2))
    assert [r[2] for r in results] == [0, 0, 1, 1]


def test_sizes_that_do_not_fit_the_world():
    with pytest.raises(AssertionError, match=r"SF104.*\n.*replicate=3"):
        run_ranks(places, world=4, init={"replicate": 3})


def test_no_group():
    assert not dist.is_initialized()
    with pytest.raises(ShardfitError, match="init_distributed"):
        make_mesh()
