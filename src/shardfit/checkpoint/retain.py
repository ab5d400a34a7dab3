"""Retention: which checkpoints have had their time. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from shardfit.checkpoint.layout import Slot
from shardfit.errors import ShardfitError


def choose_expired(
    committed: Iterable[Slot], *, keep: int | None = None, keep_every: int | None = None
) -> list[Slot]:
    """The checkpoints to delete, oldest first.

    Args:
        committed: committed checkpoints only: what is unfinished counts for nothing.
        keep: this many of the newest stay. None: all stay.
        keep_every: a checkpoint whose step is a multiple of it stays for good. None: only
            the newest stay.

    A step that was saved again has replaced the checkpoint before it, which always goes.
    """
    check_policy(keep, keep_every)
    newest_first = sorted(committed, reverse=True)
    current: list[Slot] = []
    expired: list[Slot] = []
    steps: set[int] = set()
    for slot in newest_first:
        (expired if slot.step in steps else current).append(slot)
        steps.add(slot.step)
    if keep is not None:
        expired += [slot for slot in current[keep:] if not (keep_every and slot.step % keep_every == 0)]
    return sorted(expired)


def check_policy(keep: int | None, keep_every: int | None) -> None:
    """ShardfitError unless both are None or at least 1."""
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ShardfitError(
                f"{name} is a number of {'checkpoints' if name == 'keep' else 'steps'}, at least 1",
                evidence=f"{name}={value!r}",
                fix="None keeps every checkpoint" if name == "keep" else "leave it out, or give steps",
            )
