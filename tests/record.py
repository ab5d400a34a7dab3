"""Recordings of small scripts for tests, in processes forked from one that has imported torch.

    recording = record(tmp_path / "candidate", SOURCE, ranks=2, steps=4)

As `shardfit.parity.run` records, but without torchrun and a new interpreter for each rank: a
recording of two ranks takes about a second. `folder` holds `script.py`, which runs there, and `record`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shardfit.parity.recording import Recording

LIMIT_SECONDS = 60.0
# What every script would import in the course of its run.
_PRELOADED = [
    "shardfit.parity.recorder",
    "shardfit.checkpoint.checkpointer",
    "shardfit.train.random",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
]


def record(
    folder: Path,
    source: str,
    *,
    ranks: int = 1,
    steps: int | None = None,
    argv: tuple[str, ...] = (),
    exchange_seconds: float = 10.0,
    **limits: Any,
) -> Recording:
    """Run `source` on that many ranks under the recorder; `limits` are those of `observe_cuts.Limits`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.py"
    script.write_text(source)
    out = folder / "record"
    out.mkdir()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = _free_port()
    processes = []
    for rank in range(ranks):
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        launch = {name: str(value) for name, value in launch.items()}
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = (out, script, list(argv), launch, {"steps": steps, **limits}, exchange_seconds)
        processes.append(context.Process(target=_record, args=arguments))
        processes[-1].start()
    end = time.monotonic() + LIMIT_SECONDS
    try:
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
    finally:
        slow = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    said = "\n".join(file.read_text() for file in sorted(out.glob("output-*.txt")))
    assert not slow, f"ranks {slow} did not end\n{said}"
    recording = Recording.read(out)
    assert len(recording.ranks) == ranks, said
    return recording


def _record(
    out: Path, script: Path, argv: list[str], launch: dict[str, str], limits: Any, exchange_seconds: float
) -> None:
    if launch["WORLD_SIZE"] != "1":
        os.environ.update(launch)
    output = os.open(out / f"output-{launch['RANK']}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(script.parent)
    import torch

    from shardfit.parity.observe_cuts import Limits
    from shardfit.parity.recorder import Recorder

    torch.set_num_threads(1)
    Recorder(
        out, script=str(script), argv=argv, limits=Limits(**limits), exchange_seconds=exchange_seconds
    ).run()
    sys.stdout.flush()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
