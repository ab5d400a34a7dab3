"""Train a byte-level GPT on the sources of the Python standard library, on one device.

    python train.py --steps 200
    python train.py --steps 400 --resume

Plain PyTorch: `train_fsdp2.py` beside it is the same script, fully sharded.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from model import GPT


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
def evaluate(model, tokens, args, device, batches=4):
    model.eval()
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(batches):
        x, y = get_batch(tokens, args.batch_size, args.context, generator)
        total += model(x.to(device), y.to(device)).item()
    model.train()
    return total / batches


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_tokens, eval_tokens = load_text()

    model = GPT(args.dim, args.layers, args.heads, args.context).to(device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )

    def schedule(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    checkpoint = Path(args.out) / "checkpoint.pt"
    start = 0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"].cpu())
        start = state["step"]
        print(f"resumed at step {start}")

    began = time.perf_counter()
    for step in range(start, args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            x, y = get_batch(train_tokens, args.batch_size, args.context)
            loss = model(x.to(device), y.to(device)) / args.accumulate
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        rate = args.batch_size * args.accumulate * args.context * (step + 1 - start)
        rate /= time.perf_counter() - began
        print(f"step {step:4d}  loss {total:.4f}  norm {norm:.3f}  {rate:,.0f} tokens/s")
        if (step + 1) % args.eval_every == 0:
            print(f"step {step:4d}  held-out loss {evaluate(model, eval_tokens, args, device):.4f}")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "rng": torch.get_rng_state(),
                    "step": step + 1,
                },
                checkpoint,
            )


if __name__ == "__main__":
    main()
