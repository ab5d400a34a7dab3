"""Seeds and random state: what is alike on all ranks, and what each draws for itself."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from shardfit.train.draws import RankDraws as RankDraws
from shardfit.train.draws import global_draws as global_draws
from shardfit.train.draws import rank_draws as rank_draws
from shardfit.train.launch import Ranks


def seed_all(seed: int, ranks: Ranks | None = None) -> None:
    """Seed Python's generator, numpy's if it is imported, and torch's on all devices.

    Args:
        seed: from 0.
        ranks: None seeds all ranks alike: what a build, a shuffle or a split of data needs. Given,
            each data rank gets a seed of its own (ranks of one "tensor" group the same): for
            augmentation and noise outside the model. For dropout inside it see `rank_draws`.
    """
    if ranks is not None:
        seed = _mixed(seed, ranks.data_rank)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of the generators that `seed_all` seeds, of this process: tensors, tuples and numbers."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` returned. State of a device that isn't here is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _mixed(seed: int, place: int) -> int:
    """A seed for each place that is far from those of other places and seeds (SplitMix64)."""
    mixed = (seed + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
