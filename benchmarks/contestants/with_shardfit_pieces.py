"""shardfit's pieces in a loop of one's own, as in examples/bytelm."""

import shardfit
from shardfit.train.clip import clip_grad_norm_
from shardfit.train.optimizer import build_optimizer
from shardfit.train.step import sync_gradients

from .model import build, loss_of


class Contestant:
    def __init__(self, size, world):
        self.model = shardfit.shard(build(size))
        self.optimizer = build_optimizer(self.model, lr=3e-4)

    def step(self, batches, max_norm):
        total = 0.0
        for index, (x, y) in enumerate(batches):
            sync_gradients(self.model, index == len(batches) - 1)
            loss = loss_of(self.model(x), y) / len(batches)
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total), float(norm)
