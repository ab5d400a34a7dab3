"""Train a byte-level GPT on the sources of the Python standard library, fully sharded (FSDP2).

    torchrun --standalone --nproc-per-node 2 train_fsdp2.py --steps 200
    torchrun --standalone --nproc-per-node 4 train_fsdp2.py --steps 400 --resume

`train.py` beside it is the same script on one device; `diff train.py train_fsdp2.py` shows what
changed. The batch size stays the global one: every rank draws it and trains on its own rows.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from model import GPT

import shardfit


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches to a step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


def load_text():
    """The standard library's top-level modules as one tensor of bytes: (train, held out)."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    cut = int(0.95 * len(tokens))
    return tokens[:cut], tokens[cut:]


def get_batch(tokens, batch_size, context, generator=None):
    starts = torch.randint(len(tokens) - context - 1, (batch_size,), generator=generator)
    x = torch.stack([tokens[s : s + context] for s in starts])
    y = torch.stack([tokens[s + 1 : s + 1 + context] for s in starts])
    return x, y


@torch.no_grad()
def evaluate(model, tokens, args, ranks, batches=4):
    model.eval()
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(batches):
        batch = get_batch(tokens, args.batch_size, args.context, generator)
        (x, y), weight = shardfit.slice_batch(batch, ranks)
        loss = model(x.to(ranks.device), y.to(ranks.device)) * weight
        total += shardfit.mean_over_ranks(loss, ranks).item()
    model.train()
    return total / batches


def main():
    args = parse_args()
    ranks = shardfit.init_distributed()
    torch.manual_seed(args.seed)
    train_tokens, eval_tokens = load_text()

    with shardfit.deferred():
        model = GPT(args.dim, args.layers, args.heads, args.context)
    shardfit.shard(model)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = shardfit.build_optimizer(
        model,
        torch.optim.AdamW,
        groups=[{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )

    def schedule(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    checkpoints = shardfit.Checkpointer(args.out, model=model, optimizer=optimizer, scheduler=scheduler)
    start = 0
    if args.resume and checkpoints.latest() is not None:
        start = checkpoints.resume()
        if ranks.is_first:
            print(f"resumed at step {start}")

    began = time.perf_counter()
    for step in range(start, args.steps):
        total = 0.0
        for micro in range(args.accumulate):
            shardfit.sync_gradients(model, micro == args.accumulate - 1)
            batch = get_batch(train_tokens, args.batch_size, args.context)
            (x, y), weight = shardfit.slice_batch(batch, ranks)
            loss = model(x.to(ranks.device), y.to(ranks.device)) * weight / args.accumulate
            loss.backward()
            total += shardfit.mean_over_ranks(loss, ranks).item()
        norm = shardfit.clip_grad_norm_(model, args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        rate = args.batch_size * args.accumulate * args.context * (step + 1 - start)
        rate /= time.perf_counter() - began
        if ranks.is_first:
            print(f"step {step:4d}  loss {total:.4f}  norm {norm:.3f}  {rate:,.0f} tokens/s")
        if (step + 1) % args.eval_every == 0:
            held_out = evaluate(model, eval_tokens, args, ranks)
            if ranks.is_first:
                print(f"step {step:4d}  held-out loss {held_out:.4f}")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            checkpoints.save(step + 1)
    shardfit.shutdown()


if __name__ == "__main__":
    main()
