"""shardfit: take your own PyTorch training script to fully sharded training (FSDP2).

Public names load on first use: `import shardfit` imports neither torch nor anything
else outside the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardfit.checkpoint.checkpointer import Checkpointer as Checkpointer
    from shardfit.checkpoint.checkpointer import load_checkpoint as load_checkpoint
    from shardfit.checkpoint.checkpointer import save_checkpoint as save_checkpoint
    from shardfit.checkpoint.manifest import Manifest as Manifest
    from shardfit.errors import ShardfitError as ShardfitError
    from shardfit.findings import Finding as Finding
    from shardfit.findings import Report as Report
    from shardfit.plan import MeshShape as MeshShape
    from shardfit.plan import Plan as Plan
    from shardfit.plan import Precision as Precision
    from shardfit.plan import Unit as Unit
    from shardfit.train.build import build_model_meta as build_model_meta
    from shardfit.train.clip import clip_grad_norm_ as clip_grad_norm_
    from shardfit.train.clip import grad_norm as grad_norm
    from shardfit.train.data import BatchSlice as BatchSlice
    from shardfit.train.data import Share as Share
    from shardfit.train.data import SlicedBatches as SlicedBatches
    from shardfit.train.data import local_batch_size as local_batch_size
    from shardfit.train.data import lockstep as lockstep
    from shardfit.train.data import make_sampler as make_sampler
    from shardfit.train.data import mean_over_ranks as mean_over_ranks
    from shardfit.train.data import share_of as share_of
    from shardfit.train.data import slice_batch as slice_batch
    from shardfit.train.init import deferred as deferred
    from shardfit.train.launch import Ranks as Ranks
    from shardfit.train.launch import init_distributed as init_distributed
    from shardfit.train.launch import shutdown as shutdown
    from shardfit.train.mesh import make_mesh as make_mesh
    from shardfit.train.optimizer import build_optimizer as build_optimizer
    from shardfit.train.optimizer import decay_matrices as decay_matrices
    from shardfit.train.optimizer import find_unmoved as find_unmoved
    from shardfit.train.random import global_draws as global_draws
    from shardfit.train.random import random_state as random_state
    from shardfit.train.random import rank_draws as rank_draws
    from shardfit.train.random import seed_all as seed_all
    from shardfit.train.random import set_random_state as set_random_state
    from shardfit.train.shard import plan_of as plan_of
    from shardfit.train.shard import shard as shard
    from shardfit.train.step import StepResult as StepResult
    from shardfit.train.step import sync_gradients as sync_gradients
    from shardfit.train.step import train_step as train_step
    from shardfit.train.units import plan_units as plan_units
    from shardfit.train.weights import load_weights as load_weights

_HOMES = {
    "shardfit.checkpoint.checkpointer": ("Checkpointer", "load_checkpoint", "save_checkpoint"),
    "shardfit.checkpoint.manifest": ("Manifest",),
    "shardfit.errors": ("ShardfitError",),
    "shardfit.findings": ("Finding", "Report"),
    "shardfit.plan": ("MeshShape", "Plan", "Precision", "Unit"),
    "shardfit.train.clip": ("clip_grad_norm_", "grad_norm"),
    "shardfit.train.data": (
        "BatchSlice",
        "Share",
        "SlicedBatches",
        "local_batch_size",
        "lockstep",
        "make_sampler",
        "mean_over_ranks",
        "share_of",
        "slice_batch",
    ),
    "shardfit.train.build": ("build_model_meta",),
    "shardfit.train.init": ("deferred",),
    "shardfit.train.launch": ("Ranks", "init_distributed", "shutdown"),
    "shardfit.train.mesh": ("make_mesh",),
    "shardfit.train.optimizer": ("build_optimizer", "decay_matrices", "find_unmoved"),
    "shardfit.train.random": ("global_draws", "random_state", "rank_draws", "seed_all", "set_random_state"),
    "shardfit.train.shard": ("plan_of", "shard"),
    "shardfit.train.step": ("StepResult", "sync_gradients", "train_step"),
    "shardfit.train.units": ("plan_units",),
    "shardfit.train.weights": ("load_weights",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if (home := _HOME_OF.get(name)) is None:
        raise AttributeError(f"module 'shardfit' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
