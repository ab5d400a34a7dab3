"""The only module that names private parts of torch, each behind a name of our own.

A name that a torch release has moved degrades to "unknown" (None, or False from a
setter), never to a wrong answer. Each has a test in tests/test_torch.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> bool:
    """Change the time limit of a group's collectives. False where torch can't."""
    setter = getattr(c10d, "_set_pg_timeout", None)
    if setter is None:
        return False
    setter(timedelta(seconds=seconds), group)
    return True


def all_groups() -> Iterable[dist.ProcessGroup]:
    """The process groups that this rank belongs to."""
    world = getattr(c10d, "_world", None)
    if world is None:
        return [dist.group.WORLD] if dist.group.WORLD is not None else []
    return list(world.pg_map)
