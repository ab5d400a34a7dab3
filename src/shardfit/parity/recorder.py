"""Run a script as it is and record its training.

    python -m shardfit.parity.recorder FOLDER [--steps N] SCRIPT [ARG ...]

In one process for the original, in each rank under torchrun for the candidate. The script
is not edited; torch's public calls are observed. Written into FOLDER by each rank:
`progress-R.jsonl` (as it happens), `output-R.txt` (what the script printed), `stacks-R.txt`
(if it is asked for them by SIGUSR1), and at the end `weights-R.pt` and `rank-R.json`, see
`shardfit.parity.recording`.

`RankRecord.facts`, all JSON-able; a fact that can't be told is None or left out. Steps are
counted from 0 in this process.

Modules and parameters, at the first optimizer step (at the end if there was none):

* `models`: class names of the trained modules: the outermost that hold an optimizer's parameters,
  or that were called. With more than one, names of parameters begin with the class name.
* `fsdp_units`: of FSDP2, in order of paths: {"path", "params": names, "reshard": bool or the ranks
  of a smaller mesh, "param_dtype", "reduce_dtype": None where not set, "mesh": sizes, "root": whether
  it is the root of its forward}. [] where there is no FSDP2. None: unknown.
* `root_sharded`: whether every trained module is itself a unit. None without FSDP2.
* `unsharded`: names of trainable parameters that are not DTensors, where world > 1.
* `ddp`: whether DistributedDataParallel wraps a trained module.
* `orphans`: names of tensors that an optimizer holds and no module has (SF501).
* `not_in_optimizer`: names of trainable parameters that no optimizer holds.
* `optimizers`: {"class", "groups": numbers of parameters, "steps"}; `steps` at the end.
* `schedulers`: {"class", "last_epoch": at the end, "drives": whether its optimizer stepped}.
* `changed`: {fact: value at the end} of those above that have another value then.

Steps (those by which torch's checkpoint code makes an optimizer's state, without loss and gradient,
do not count):

* `backwards`, `forwards`: for each step, how many; `forwards` of trained modules with gradients on.
* `modes`: for each step, whether all those forwards were in training mode.
* `missing_grads`: {step: names of trainable parameters in an optimizer, without gradient}, of the
  first three steps; steps where none is missing are left out.
* `unsynced`: steps before whose last backward a unit was told not to reduce gradients, and
  `unsynced_units`: its path, of the first such step.
* `unmoved`: names of parameters whose gradient was not zero and which the first step left as they
  were, although its lr was above 0.
* `forward_called_directly`: class names of FSDP2 modules whose `forward` ran without their hooks (SF306).
* `clips`: {"call", "step", "max_norm", "norm": as returned, None for a DTensor}, the first 1000.
  More than one of a step: clipped at every micro-batch.
* `loss_dtypes`, `grad_dtypes`: {dtype: how often}, of losses given to backward and of parameters'
  gradients at the first step.
* `scales`: for each step the GradScaler's factor; left out without one.
* `closure`: True where an optimizer was given a closure (LBFGS).

Data and draws:

* `row_digests`: {step: [digests of the rows of the inputs, at most 512, for each forward]}, of the
  first two steps. The original's in order are the candidate's ranks' joined, if the batch is sliced
  right; the same on all ranks, if it is not sliced.
* `draws`: how random draws inside the model were made: "global" (the whole batch's, this rank's rows
  kept), "alike" (all data ranks have the same inputs, and draw the same), "own" (could not be brought
  in line, see `draws_why`), "one" (one data rank).
* `rng`: digest of torch's CPU generator at the first forward of each step.
* `rng_differs`: True where the ranks' generators differed at a forward; inside it they then drew as rank 0.
* `exchange_broken`: why the ranks' recorders lost each other (ranks that do different numbers of
  forwards); left out if they did not.

Files:

* `reads`: checkpoints read, {"call", "file", "after_steps"}; `save_files`: files of `saves`, in order.
* `saved_outside`: those of them that lie outside the folder that was copied for the run.
* `snapshot`: after how many steps the stopped state was kept, for the resume (rank 0).

Ends:

* `failed_at`: seconds since the epoch, where it ended by an error. The least is the first.
* `recorder_error`: the trace of an exception of the recorder itself: what it could not see is missing
  from the record. Left out where there was none.
* `warnings`: the first 20 different, as "Category: message".
* `buffers`: {name: digest} of floating-point buffers of trained modules at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

import torch

from shardfit.parity.observe import Observer
from shardfit.parity.observe_cuts import Limits
from shardfit.parity.observe_inputs import Exchange
from shardfit.parity.recording import Ending, Part, RankRecord, Step
from shardfit.parity.scratch import make_own

# Ranks that have ended wait so long for the others to write their records too: a launcher that
# sees one end badly ends the rest at once.
_MEET_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Recorder:
    """One process's run of a script, from its start to its record.

    Args:
        folder: of the recording.
        script: its path; `argv`: its arguments.
        limits: where the run is cut.
        exchange_seconds: how long this rank's recorder waits for the others'.
    """

    def __init__(
        self, folder: Path, *, script: str, argv: list[str], limits: Limits, exchange_seconds: float
    ) -> None:
        self.folder = folder
        self.script = script
        self.argv = argv
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self._is_written = False
        self._progress_file = folder / f"progress-{self.rank}.jsonl"
        self._progress = self._progress_file.open("w", encoding="utf-8")
        self._stacks = (folder / f"stacks-{self.rank}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._tell({"rank": self.rank, "world": self.world, "pid": os.getpid()})
        exchange = Exchange(folder, rank=self.rank, world=self.world, timeout_seconds=exchange_seconds)
        self.observer = Observer(
            exchange=exchange,
            limits=limits,
            on_step=self._on_step,
            on_stop=self._stop,
            on_beat=lambda: os.utime(self._progress_file),
        )
        self.observer.files.on_save = lambda save: self._tell({"save": dataclasses.asdict(save)})

    def run(self) -> None:
        """Run the script as `python script` would; return if it ends well, else end the process."""
        self.observer.install()
        sys.argv[:] = [self.script, *self.argv]
        sys.path[0] = str(Path(self.script).resolve().parent)
        main = types.ModuleType("__main__")
        main.__file__ = self.script
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", self.script)
        main.__dict__["__builtins__"] = __builtins__
        self._ours = sys.modules["__main__"]  # without a reference its names would be cleared
        sys.modules["__main__"] = main
        try:
            source = Path(self.script).read_bytes()
            exec(compile(source, self.script, "exec"), main.__dict__)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                self._fail(leaving, code=leaving.code if isinstance(leaving.code, int) else 1)
        except BaseException as error:
            self._fail(error, code=1)
        self._write("finished")
        self._meet()

    def _on_step(self, step: Step) -> None:
        self._tell({"step": dataclasses.asdict(step)})
        if step.index == 0:
            self._tell({"facts": self.observer.first_facts})

    def _tell(self, line: dict[str, Any]) -> None:
        self._progress.write(json.dumps(line) + "\n")
        self._progress.flush()

    def _stop(self) -> None:
        """End here, whatever the script would do to an exception."""
        self._write("stopped")
        self._meet()
        _end(0)

    def _fail(self, error: BaseException, *, code: int) -> None:
        trace = _trace_of(error)
        self._tell({"error": trace, "failed_at": time.time()})
        self._write("error", error=error, trace=trace)
        print(trace, file=sys.stderr)
        # A script's own excepthook tells its other ranks.
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        _end(code)

    def _write(self, ended: Ending, *, error: BaseException | None = None, trace: str = "") -> None:
        observer = self.observer
        failed_at = time.time()
        facts: dict[str, Any] = {}
        parts: list[tuple[Part, torch.Tensor]] = []
        data_rank, data_world = self.rank, self.world
        # The script's own ending is told also where what it left can't be read.
        try:
            observer.finish()
            facts = observer.facts()
            parts = observer.models.parts()
            data_rank, data_world = observer.data_place
        except Exception:
            facts["recorder_error"] = traceback.format_exc()
        if error is not None:
            facts["failed_at"] = failed_at
        # Of two tensors with one name, the model's comes first, and is the one that trains.
        weights: dict[str, torch.Tensor] = {}
        for part, values in parts:
            weights.setdefault(part.name, values)
        torch_save = getattr(torch.save, "__wrapped__", torch.save)
        torch_save(weights, self.folder / f"weights-{self.rank}.pt")
        cuda = torch.cuda.is_available()
        RankRecord(
            script=self.script,
            argv=tuple(self.argv),
            rank=self.rank,
            world=self.world,
            data_rank=data_rank,
            data_world=data_world,
            torch_version=str(torch.__version__),
            device=observer.models.device,
            ended=ended,
            steps=tuple(observer.steps),
            parts=tuple(part for part, _ in parts),
            saves=tuple(observer.files.saves),
            facts=facts,
            error=traceback.format_exception_only(error)[-1].strip() if error is not None else "",
            trace=trace,
            peak_bytes=_peak_bytes(),
            peak_device_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        ).write(self.folder)
        self._is_written = True

    def _meet(self) -> None:
        end = time.monotonic() + _MEET_SECONDS
        files = [self.folder / f"rank-{rank}.json" for rank in range(self.world)]
        while time.monotonic() < end and not all(file.exists() for file in files):
            time.sleep(0.02)


def _trace_of(error: BaseException) -> str:
    """The traceback without the recorder's own frames."""
    ours = os.path.dirname(os.path.abspath(__file__))
    trace = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [trace]
    while pending:
        current = pending.pop()
        if current is None:
            continue
        current.stack = traceback.StackSummary.from_list(
            [frame for frame in current.stack if not frame.filename.startswith(ours)]
        )
        pending += [current.__cause__, current.__context__]
    return "".join(trace.format())


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Linux: a launcher that is killed takes this process with it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_inside(scratch: Path) -> None:
    """What the script opens to write in its copy is its own, also where a link stands for a large file."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str) or not isinstance(args[2], int):
            return
        if args[2] & (os.O_WRONLY | os.O_RDWR):
            make_own(args[0], scratch, keep=not args[2] & os.O_TRUNC)

    sys.addaudithook(audit)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shardfit.parity.recorder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stop-after-save", type=int)
    parser.add_argument("--snapshot-at", type=int)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--snapshot", type=Path)
    parser.add_argument("--exchange-seconds", type=float, default=30.0)
    parser.add_argument("--redirect", action="store_true", help="what the script prints: into the folder")
    parser.add_argument("script")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    _die_with_parent()
    if args.redirect:
        output = os.open(
            args.folder / f"output-{os.environ.get('RANK', '0')}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
    if args.scratch is not None:
        _keep_inside(args.scratch)
    limits = Limits(
        steps=args.steps,
        stop_after_save=args.stop_after_save,
        snapshot_at=args.snapshot_at,
        scratch=args.scratch,
        snapshot=args.snapshot,
    )
    Recorder(
        args.folder,
        script=args.script,
        argv=args.argv,
        limits=limits,
        exchange_seconds=args.exchange_seconds,
    ).run()


if __name__ == "__main__":
    main()
