"""The benchmark of peak memory while building, scaled down: what it promises, in fresh processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
MIB = 2**20


def test_a_rank_holds_its_part_and_one_parameter(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    from build_memory import measure

    size = {"dim": 512, "layers": 8, "ranks": 2}
    deferred = measure("deferred", folder=tmp_path / "deferred", **size)
    plain = measure("plain", folder=tmp_path / "plain", **size)
    assert [r["checksum"] for r in deferred] == [r["checksum"] for r in plain]
    weights, largest = plain[0]["weights_bytes"], plain[0]["largest_bytes"]
    limit = weights / 2 + 1.25 * largest + 24 * MIB
    assert weights > limit, "the model is too small to tell"
    assert all(r["peak_bytes"] < limit for r in deferred), deferred
    assert all(r["peak_bytes"] > weights for r in plain), plain
