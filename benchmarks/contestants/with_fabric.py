"""Lightning Fabric with ModelParallelStrategy (FSDP2); the wrapping is the user's own."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from .model import build, loss_of


def parallelize(model, mesh):
    mesh = mesh["data_parallel"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.tokens, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


class Contestant:
    def __init__(self, size, world):
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=world, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup(build(size))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def step(self, batches, max_norm):
        total = 0.0
        for index, (x, y) in enumerate(batches):
            with self.fabric.no_backward_sync(self.model, enabled=index < len(batches) - 1):
                loss = loss_of(self.model(x), y) / len(batches)
                self.fabric.backward(loss)
            total += loss.detach()
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
