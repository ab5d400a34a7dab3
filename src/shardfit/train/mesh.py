"""Device meshes by name: replicate x shard x tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfit.errors import ShardfitError
from shardfit.plan import MeshShape

DATA_AXES = ("replicate", "shard")


def make_mesh(
    device: str | torch.device | None = None,
    *,
    replicate: int = 1,
    shard: int | None = None,
    tensor: int = 1,
) -> DeviceMesh:
    """A mesh over all ranks with the axes "replicate", "shard" and "tensor", outermost first.

    Axes of size 1 are left out, but for "shard", which is always there: 1-D FSDP, 2-D
    HSDP, and either of them with a tensor-parallel axis innermost, so that its ranks are
    neighbours on a host.

    Args:
        device: "cpu", "cuda" or a device of that type. None: that of the default group.
        replicate: copies of the model.
        shard: ranks that each copy is sharded over. None: what the other axes leave.
        tensor: size of the tensor-parallel axis.

    Raises:
        ShardfitError: no process group, or sizes that don't multiply to the world (SF104).
    """
    if not dist.is_initialized():
        raise ShardfitError(
            "there is no process group to lay a mesh over",
            evidence="torch.distributed.is_initialized() is False",
            fix="call init_distributed() first",
        )
    shape = MeshShape(replicate=replicate, shard=shard, tensor=tensor).resolve(dist.get_world_size())
    sizes = {"replicate": shape.replicate, "shard": shape.shard or 1, "tensor": shape.tensor}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    kind = torch.device(device).type if device is not None else _default_device_type()
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that `fully_shard` works over: its data axes, without "tensor"."""
    names = mesh.mesh_dim_names or ()
    axes = tuple(name for name in DATA_AXES if name in names)
    if not axes:
        raise ShardfitError(
            "the mesh has no data axis",
            evidence=f"axes {names}",
            fix='make it with make_mesh, or name its axes "replicate", "shard" and "tensor"',
        )
    if axes == names:
        return mesh
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]


def mesh_shape(mesh: DeviceMesh) -> MeshShape:
    """The sizes of a mesh's axes, as a value."""
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.size(dim) for dim, name in enumerate(names)}
    return MeshShape(
        replicate=sizes.get("replicate", 1), shard=sizes.get("shard", 1), tensor=sizes.get("tensor", 1)
    )


def _default_device_type() -> str:
    backends = str(dist.get_backend_config(dist.group.WORLD))
    return "cuda" if "cuda" in backends and torch.cuda.is_available() else "cpu"
