from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    from ranks import close_ranks

    close_ranks()
