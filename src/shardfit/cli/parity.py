"""`shardfit parity ORIGINAL CANDIDATE`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

USAGE = "shardfit parity ORIGINAL CANDIDATE [OPTION ...] [-- SCRIPT_ARG ...]"
SUMMARY = "does the candidate train like the original?"
DESCRIPTION = """\
Run ORIGINAL in one process and CANDIDATE under torchrun on several ranks of this machine, as they
are, and compare losses, gradient norms before clipping, learning rates and final weights; then
start the candidate again from what it saved, on as many ranks and on others, and compare again.
The scripts run in copies of their folder. Arguments after -- are given to both scripts.
"""
EPILOG = """\
example:
  $ shardfit parity train.py train_fsdp2.py --resume-args=--resume -- --save-every 10
  what                      original  candidate  largest difference               tolerance  verdict
  loss                       3.01806    3.01806  6.4e-08 (step 12)                  7.6e-06  same
  gradient norm, unclipped   2.46928    2.46928  1.1e-07 (step 11)                  6.1e-05  same
  learning rate             9.95e-04   9.95e-04  0                                  1.0e-09  same
  final weights (44)               —          —  6.3e-07                            3.1e-04  same
                                                 (blocks.0.attention.qkv.weight)
  resume at 10, 2 ranks      3.01806    3.01806  6.4e-08 (loss, step 12)            7.6e-06  same
  resume at 10, 4 ranks      3.01806    3.01806  1.1e-07 (loss, step 19)            7.6e-06  same
  ...
  the same: train.py against train_fsdp2.py: 20 steps on 2 ranks, and resumed on 2 and 4 ranks

exit status: 0 the same, 1 it differs (or hangs, or fails), 2 wrong usage, 3 the original failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("original", metavar="ORIGINAL", help="the script for one device")
    add("candidate", metavar="CANDIDATE", help="the sharded script")
    add("--ranks", type=int, default=2, metavar="N", help="ranks of the candidate (default 2)")
    add("--steps", type=int, default=20, metavar="N", help="optimizer steps to compare (default 20)")
    add("--resume-at", type=int, metavar="K", help="resume from what was saved at step K (default: half)")
    add("--resume-ranks", type=int, nargs="+", metavar="N", help="on these (default: N and 2 N, at most 4)")
    add("--resume-args", type=shlex.split, default=[], metavar="ARGS", help="what makes the candidate resume")
    add("--no-resume", action="store_true", help="don't check the resume")
    add(
        "--candidate-args",
        type=shlex.split,
        metavar="ARGS",
        help="the candidate's, in place of those after --",
    )
    add("--rtol", type=float, metavar="R", help="relative tolerance of losses and gradient norms")
    add("--timeout", type=float, default=60.0, metavar="S", help="silence that counts as a hang (default 60)")
    add("--keep", type=Path, metavar="FOLDER", help="keep the runs' copies and records there")
    add("--json", metavar="FILE", help="write the report as JSON (-: to stdout, and nothing else there)")
    add("--html", type=Path, metavar="FILE", help="write the report as a page")


def run(options: argparse.Namespace) -> int:
    """Prove, show, write; return the exit status."""
    from shardfit.parity.html import page_of
    from shardfit.parity.parity import prove
    from shardfit.parity.render import Watch, open_console, render
    from shardfit.parity.write import write_whole

    console = open_console(stderr=options.json == "-")
    with Watch(console) as watch:
        report = prove(
            options.original,
            options.candidate,
            ranks=options.ranks,
            steps=options.steps,
            resume_at=options.resume_at,
            resume_ranks=() if options.no_resume else options.resume_ranks,
            resume_args=options.resume_args,
            argv=options.script_args,
            candidate_argv=options.candidate_args,
            timeout_seconds=options.timeout,
            keep=options.keep,
            rtol=options.rtol,
            progress=watch,
        )
    render(report, console)
    if options.html:
        write_whole(options.html, page_of(report))
        console.print(f"page: {options.html}", markup=False)
    if options.json == "-":
        sys.stdout.write(report.to_json() + "\n")
    elif options.json:
        write_whole(Path(options.json), report.to_json() + "\n")
    return report.exit_status
