"""Peak memory of each rank while a model is built: plainly, from rank 0, and deferred.

    python benchmarks/build_memory.py                 # 400 M parameters, 4 ranks
    python benchmarks/build_memory.py --layers 4 --dim 512 --ranks 2

What is measured is the peak of anonymous resident memory of each process over what it had before it
began to build (Linux). All three ways end with the same weights but `broadcast`, whose random state
differs on the ranks that did not build; a checksum of the weights is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

WAYS = ("plain", "broadcast", "deferred")


def resident() -> int:
    """Anonymous resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


class Peak:
    """The highest `resident()` while it is open, over what there was before."""

    def __enter__(self) -> Peak:
        self.base = self.peak = resident()
        self.open = True
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.open:
            self.peak = max(self.peak, resident())
            time.sleep(0.001)

    def __exit__(self, *_) -> None:
        self.open = False
        self.thread.join()
        self.bytes = max(self.peak, resident()) - self.base


def make_model(dim: int, layers: int):
    import torch.nn as nn

    layer = {"d_model": dim, "nhead": 8, "dim_feedforward": 4 * dim, "batch_first": True}
    return nn.Sequential(
        nn.Embedding(32000, dim),
        nn.Sequential(*(nn.TransformerEncoderLayer(**layer) for _ in range(layers))),
        nn.LayerNorm(dim),
        nn.Linear(dim, 32000, bias=False),
    )


def build(way: str, dim: int, layers: int, ranks) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    import shardfit

    torch.manual_seed(0)
    dist.barrier()
    began = time.perf_counter()
    with Peak() as peak:
        if way == "deferred":
            with shardfit.deferred():
                model = make_model(dim, layers)
            shardfit.shard(model)
        elif way == "plain":
            model = make_model(dim, layers)
            shardfit.shard(model)
        else:
            model = broadcast(dim, layers, ranks)
    seconds = time.perf_counter() - began
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total += parameter.detach().to_local().double().sum()
    dist.all_reduce(total)
    return {
        "peak_bytes": peak.bytes,
        "seconds": seconds,
        "checksum": float(total),
        "weights_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "largest_bytes": max(p.numel() * p.element_size() for p in model.parameters()),
    }


def broadcast(dim: int, layers: int, ranks):
    """As the FSDP2 tutorial does it: rank 0 builds, the others wait on meta and receive."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    state = make_model(dim, layers).state_dict() if ranks.is_first else {}
    with torch.device("meta"):
        model = make_model(dim, layers)
    for layer in model[1]:
        fully_shard(layer, mesh=ranks.data_mesh)
    fully_shard(model[0], mesh=ranks.data_mesh)
    fully_shard(model, mesh=ranks.data_mesh)
    model.to_empty(device=ranks.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


def run_rank(args: argparse.Namespace) -> None:
    import shardfit

    ranks = shardfit.init_distributed(device="cpu")
    result = build(args.way, args.dim, args.layers, ranks)
    Path(args.out, f"{ranks.rank}.json").write_text(json.dumps(result))
    shardfit.shutdown()


def measure(way: str, *, dim: int, layers: int, ranks: int, folder: Path) -> list[dict[str, float]]:
    """Build in fresh processes; the result of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [__file__, "--way", way, "--out", str(folder), "--dim", str(dim), "--layers", str(layers)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dim", type=int, default=1152)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="out/build_memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        run_rank(args)
        return
    mib = 2**20
    for way in WAYS:
        results = measure(
            way, dim=args.dim, layers=args.layers, ranks=args.ranks, folder=Path(args.out) / way
        )
        first = results[0]
        if way == WAYS[0]:
            shard = first["weights_bytes"] / args.ranks / mib
            print(
                f"{first['weights_bytes'] / 4e6:.0f} M parameters, {first['weights_bytes'] / mib:.0f} MiB in "
                f"fp32; a rank's part {shard:.0f} MiB, largest {first['largest_bytes'] / mib:.0f} MiB"
            )
        peaks = " ".join(f"{r['peak_bytes'] / mib:7.0f}" for r in results)
        print(
            f"{way:10} peak MiB by rank {peaks}   {max(r['seconds'] for r in results):6.1f} s   "
            f"checksum {first['checksum']:.6f}"
        )


if __name__ == "__main__":
    main()
