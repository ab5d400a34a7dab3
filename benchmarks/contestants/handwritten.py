"""Hand-written FSDP2, no shardfit: the reference."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .model import build, loss_of


class Contestant:
    def __init__(self, size, world):
        mesh = init_device_mesh("cpu", (world,))
        self.model = model = build(size)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model.tokens, mesh=mesh)
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(self, batches, max_norm):
        total = 0.0
        for index, (x, y) in enumerate(batches):
            self.model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = loss_of(self.model(x), y) / len(batches)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total), float(norm.full_tensor())
