"""Step time beside hand-written FSDP2, accelerate and Lightning Fabric, in the same run.

    torchrun --standalone --nproc-per-node 2 benchmarks/step.py --size s34 --rounds 12

All contestants live in the same processes and take turns: in each round every one makes a few
steps, in an order that rotates, on the same batches. Ratios are taken within a round (time of a
contestant / time of the hand-written one) and the median over rounds is shown, so what else the
machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from contestants.model import SIZES, batch_of

import shardfit

NAMES = ("handwritten", "with_shardfit", "with_shardfit_pieces", "with_accelerate", "with_fabric")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="s34")
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contestant in a round")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch on each rank")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0, help="start no round after that")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def slowest(seconds: list[float]) -> list[float]:
    """The largest of each number over the ranks."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    torch.set_num_threads(1)
    ranks = shardfit.init_distributed(device="cpu")
    size = SIZES[args.size]
    names = args.names.split(",")
    contestants = {}
    for name in names:
        module = importlib.import_module(f"contestants.{name}")
        contestants[name] = module.Contestant(size, ranks.world)
    step = 0
    rounds: list[dict[str, tuple[float, float]]] = []
    last: dict[str, tuple[float, float]] = {}
    began = time.monotonic()
    for number in range(-1, args.rounds):  # the first is warm-up
        (elapsed,) = slowest([time.monotonic() - began])
        if number > 0 and elapsed > args.seconds:
            break
        batches = [
            [
                batch_of(size, (step + i) * args.accumulate + micro, args.rows, ranks.rank)
                for micro in range(args.accumulate)
            ]
            for i in range(args.steps)
        ]
        step += args.steps
        times: dict[str, tuple[float, float]] = {}
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for batch in batches:
                last[name] = contestants[name].step(batch, 1.0)
            wall, cpu = slowest([time.perf_counter() - wall, time.process_time() - cpu])
            times[name] = (wall, cpu)
        if number >= 0:
            rounds.append(times)
    report(args, ranks, names, rounds, last)
    shardfit.shutdown()


def report(args, ranks, names, rounds, last) -> None:
    losses = torch.tensor([last[name][0] for name in names], dtype=torch.float64)
    dist.all_reduce(losses)
    losses /= ranks.world
    if not ranks.is_first:
        return
    reference = names[0]
    print(f"{args.size}, {ranks.world} ranks, {args.accumulate} x {args.rows} rows, {len(rounds)} rounds")
    print(f"{'':24}{'wall':>8}{'min':>7}{'max':>7}{'CPU':>8}{'ms':>9}{'norm':>11}")
    table = {}
    for name in names:
        wall = [times[name][0] / times[reference][0] for times in rounds]
        cpu = [times[name][1] / times[reference][1] for times in rounds]
        seconds = statistics.median(times[name][0] for times in rounds) / args.steps
        table[name] = {"wall": statistics.median(wall), "cpu": statistics.median(cpu), "seconds": seconds}
        print(
            f"{name:24}{statistics.median(wall):8.3f}{min(wall):7.2f}{max(wall):7.2f}"
            f"{statistics.median(cpu):8.3f}{1e3 * seconds:9.1f}{last[name][1]:11.5f}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"args": vars(args) | {"json": None}, "table": table}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
