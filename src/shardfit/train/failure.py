"""How a rank that fails ends the others: quickly, with the first error the one that is shown."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_FAILED = "failed"
_POLL_SECONDS = 0.2
# A rank that ends because of another one ends later than it: torchrun takes the earliest failure,
# in whole seconds, for the cause.
_GRACE_SECONDS = 1.5


class FailureWatch:
    """Tells the store when this rank fails, and ends this rank when another has.

    Without it, a rank whose peer has died waits in its next collective until the time limit
    (NCCL), or fails with a broken connection that hides the cause (gloo).
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        # One process serves the store: thousands of ranks ask it as often, together, as a few hundred do.
        self._poll_seconds = _POLL_SECONDS * max(1.0, world / 256)
        self._stopped = threading.Event()
        self._end_expected = False
        # A store's client serves one call at a time: the thread needs a connection of its own.
        self._thread_store: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._thread = threading.Thread(target=self._poll, name="shardfit-failure-watch", daemon=True)
        self._first_hook = self._previous_hook = sys.excepthook
        self._reporting = False

    def start(self) -> None:
        self.take_exceptions()
        self._thread.start()

    def take_exceptions(self) -> None:
        """See uncaught exceptions before any hook that is there by now (init_process_group sets one)."""
        if sys.excepthook != self._on_exception:
            self._previous_hook = sys.excepthook
            sys.excepthook = self._on_exception

    def expect_the_end(self) -> None:
        """All ranks have left: from now on a store that goes away is no failure."""
        self._end_expected = True

    def stop(self) -> None:
        self._stopped.set()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        self._thread.join(timeout=5)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._reporting:
            # Called by a hook that was set after this one and kept it as the one before.
            self._first_hook(kind, error, trace)
            return
        self._reporting = True
        first = self.claim()
        if first is None or first == self._rank:
            self._previous_hook(kind, error, trace)
            # torchrun shows the error of the rank that failed first; this is how it learns it.
            try:
                raise error.with_traceback(trace)
            except BaseException as raised:
                get_error_handler().record_exception(raised)
            # This process may host the store: the others must have read in it who failed.
            time.sleep(3 * self._poll_seconds)
        else:
            last = traceback.format_exception_only(kind, error)[-1].strip()
            print(f"[rank {self._rank}] ended after rank {first} failed ({last[:200]})", file=sys.stderr)
            time.sleep(_GRACE_SECONDS)
        _end(1)

    def claim(self) -> int | None:
        """The rank that failed first: this one, unless another was before. None: can't be known."""
        try:
            return int(self._store.compare_set(_FAILED, "", str(self._rank)))
        except (RuntimeError, ValueError):
            return None

    def _poll(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            try:
                if not self._thread_store.check([_FAILED]):
                    continue
                first: int | None = int(self._thread_store.get(_FAILED))
                reason = f"rank {first} failed (its error is shown there)"
            except (RuntimeError, ValueError):
                first, reason = None, "the host of the store has ended (rank 0, or the launcher)"
            if first == self._rank or self._stopped.wait(_GRACE_SECONDS) or self._end_expected:
                return
            print(f"[rank {self._rank}] ended: {reason}", file=sys.stderr)
            _end(1)


def _end(status: int) -> None:
    """End the process at once: a normal exit would wait for collectives that can't complete."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
