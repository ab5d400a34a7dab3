"""Memory that is freed goes back to the system, while large tensors come and go."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MIB = 2**20
_depth = 0


@contextlib.contextmanager
def returning_memory() -> Iterator[None]:
    """Within it blocks of 1 MiB and more are mapped apart, and unmapped when freed (glibc only).

    Otherwise the C library keeps what whole parameters leave behind in its heap, and the peak is
    that of a plain build. After it, the largest thresholds that glibc would come to by itself.
    """
    global _depth
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MIB)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
            mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
