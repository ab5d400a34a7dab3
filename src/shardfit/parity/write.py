"""Write a report's file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from shardfit.errors import EXIT_COULD_NOT_RUN, ShardfitError


def write_whole(file: Path, text: str) -> None:
    """Write through a file beside it.

    Raises:
        ShardfitError: it can't be written there.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ShardfitError(
            "the report can't be written", evidence=str(error), exit_status=EXIT_COULD_NOT_RUN
        ) from error
