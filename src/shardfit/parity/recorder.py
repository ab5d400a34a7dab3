"""Run a script as it is and record its training: `python -m shardfit.parity.recorder FOLDER SCRIPT [ARG ...]`.

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

Steps:

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
* `warnings`: the first 20 different, as "Category: message".
* `buffers`: {name: digest} of floating-point buffers of trained modules at the end.
"""

from __future__ import annotations
