"""The catalogue of codes: one fault has one code, whichever tool sees it.

Families: SF1 launch, device, mesh; SF2 build, init, buffers; SF3 units and sharding;
SF4 precision and offload; SF5 optimizer and step; SF6 data, randomness, parity;
SF7 checkpoints; SF8 cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardfit.findings import Finding, Severity, Where


@dataclass(frozen=True)
class Rule:
    """A record of the catalogue.

    Attributes:
        code: "SF" and three digits.
        name: kebab-case, for people.
        severity: see `Finding`.
        summary: what is wrong, one sentence.
        fix: what to do, one or two sentences.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    fix: str

    def finding(self, *, message: str = "", evidence: str = "", where: Where = Where()) -> Finding:  # noqa: B008
        """A finding of this rule; `message` defaults to the summary."""
        return Finding(
            code=self.code,
            severity=self.severity,
            message=message or self.summary,
            where=where,
            evidence=evidence,
            fix=self.fix,
        )


_TABLE = (
    Rule(
        "SF102",
        "no-set-device",
        "error",
        "the ranks of a host do not each have a device of their own",
        "Launch with torchrun, at most one process a GPU, and let LOCAL_RANK pick the device.",
    ),
    Rule(
        "SF103",
        "local-rank-from-arguments",
        "error",
        "the launcher's environment is incomplete",
        "Launch with torchrun, which sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
    ),
    Rule(
        "SF104",
        "mesh-shape-hard-coded",
        "error",
        "the mesh does not have as many places as there are ranks",
        "Leave the shard axis out so that it takes what the other axes leave of the world.",
    ),
    Rule(
        "SF201",
        "materialised-never-initialised",
        "error",
        "the model has no weights yet, or memory that nothing has written",
        "Let shard(model) materialise and fill it before it is trained, saved or resumed.",
    ),
    Rule(
        "SF202",
        "some-modules-uninitialised",
        "error",
        "an initialisation reaches only some of the tensors of a meta build",
        "Write every parameter in reset_parameters or init_weights, or build inside `with deferred():`.",
    ),
    Rule(
        "SF203",
        "buffer-lost-on-meta",
        "error",
        "a buffer that the constructor computed is lost in a meta build",
        "Build inside `with deferred():`, or compute the buffer again in reset_parameters or init_weights.",
    ),
    Rule(
        "SF204",
        "tie-broken-on-meta",
        "error",
        "weights that the model ties have come apart",
        "Make the tie again before sharding, or load one value for both.",
    ),
    Rule(
        "SF205",
        "built-from-different-seeds",
        "error",
        "ranks were built from different seeds, and each keeps its rows of its own weights",
        "Seed alike on every rank before the model is built, build it within deferred(), or load weights.",
    ),
    Rule(
        "SF208",
        "initialised-by-shard",
        "error",
        "an initialisation that depends on the shape was run on a shard",
        "Let shard() initialise a deferred or meta model: it does so on whole tensors.",
    ),
    Rule(
        "SF212",
        "bare-parameter-unwritten",
        "error",
        "a bare nn.Parameter of a module without initialisation was never written in a meta build",
        "Give the module a reset_parameters that writes it, or build inside `with deferred():`.",
    ),
    Rule(
        "SF214",
        "same-rows-on-every-rank",
        "error",
        "every rank draws the same rows",
        "Let shard() initialise a deferred or meta model: each rank keeps its own rows of the whole.",
    ),
    Rule(
        "SF218",
        "random-buffer-by-rank",
        "error",
        "a buffer was drawn by each rank for itself and differs between ranks",
        "Seed alike on every rank before the model is built, or broadcast the buffer.",
    ),
    Rule(
        "SF219",
        "row-write-lost",
        "error",
        "a write to a gathered or indexed weight does not reach the shards",
        "Write to the sharded parameter as a whole, outside forward.",
    ),
    Rule(
        "SF222",
        "padding-row-not-zero",
        "error",
        "the padding row of an embedding was left random",
        "Let shard() initialise a deferred or meta model.",
    ),
    Rule(
        "SF301",
        "root-left-out",
        "error",
        "parameters outside every unit are not reduced and drift apart between ranks",
        "Call fully_shard on the root module last.",
    ),
    Rule(
        "SF303",
        "root-first",
        "error",
        "units must be sharded bottom-up, leaves first",
        "Shard inner modules before the modules that hold them.",
    ),
    Rule(
        "SF304",
        "tied-in-two-units",
        "error",
        "a tied weight is in two units",
        "Put both modules in one unit, or leave both to the root.",
    ),
    Rule(
        "SF306",
        "forward-called-directly",
        "error",
        "forward was called round the module's hooks, so that sharded parameters were never gathered",
        "Call the module itself, model(inputs), not model.forward(inputs).",
    ),
    Rule(
        "SF308",
        "container-as-unit",
        "error",
        "a container without forward can't be a unit: nothing would gather its parameters",
        "Name the container's items instead.",
    ),
    Rule(
        "SF309",
        "two-dtypes-in-one-unit",
        "error",
        "the trainable parameters of a unit have two dtypes",
        "Keep all of them in float32 and let the precision policy cast.",
    ),
    Rule(
        "SF314",
        "ddp-around-sharded-model",
        "error",
        "the model is wrapped in DDP or FSDP1",
        "Shard the plain model; shard takes the place of the wrapper.",
    ),
    Rule(
        "SF317",
        "shared-block-listed-twice",
        "error",
        "one module is listed twice, under two paths",
        "Name each module once.",
    ),
    Rule(
        "SF319",
        "sharded-twice",
        "error",
        "fully_shard was called twice on a module",
        "Name each module in one unit.",
    ),
    Rule(
        "SF324",
        "ddp-kept-inside",
        "error",
        "a DistributedDataParallel around the model keeps all parameters whole",
        "Don't wrap the model in DDP.",
    ),
    Rule(
        "SF325",
        "optimizer-after-eval-forward",
        "error",
        "the optimizer was built while the root was gathered, and holds temporary tensors",
        "Build it with build_optimizer, which reshards first, or before the first forward.",
    ),
    Rule(
        "SF329",
        "scalar-parameter",
        "error",
        "a parameter without dims can't be sharded",
        "Give it one dim of one element, and reshape it in old checkpoints.",
    ),
    Rule(
        "SF330",
        "sparse-gradient",
        "error",
        "sparse gradients can't be reduced",
        "Use sparse=False.",
    ),
    Rule(
        "SF334",
        "parameter-hook-lost",
        "error",
        "a gradient hook on a parameter never fires, since sharding replaces the parameter",
        "After sharding, use register_post_accumulate_grad_hook.",
    ),
    Rule(
        "SF338",
        "stale-root-after-no-grad-forward",
        "error",
        "a forward used parameters gathered before the last optimizer step",
        "Shard with shardfit.shard, or reshard the root after a forward under no_grad.",
    ),
    Rule(
        "SF401",
        "bf16-reduction",
        "error",
        "gradients are reduced in low precision",
        "Set the reduce dtype to float32: MixedPrecisionPolicy(reduce_dtype=torch.float32).",
    ),
    Rule(
        "SF402",
        "bf16-master-weights",
        "error",
        "the weights that the optimizer updates are kept in low precision, which loses small updates",
        "Keep masters in float32 and compute in less: Precision(param=...).",
    ),
    Rule(
        "SF404",
        "clip-before-unscale",
        "error",
        "gradients were clipped before the scaler's factor was taken out of them",
        "Call scaler.unscale_(optimizer) before clipping, as train_step does.",
    ),
    Rule(
        "SF409",
        "fp32-buffer-meets-bf16",
        "error",
        "a float32 buffer meets low-precision parameters or activations",
        "Cast the buffer where it is used, or compute under torch.autocast instead of a param dtype.",
    ),
    Rule(
        "SF411",
        "step-skipped-by-one-rank",
        "error",
        "a rank decided by itself to skip a step, and the ranks' weights drift apart",
        "Decide by the norm of the whole gradient, as train_step does.",
    ),
    Rule(
        "SF412",
        "offload-without-cpu-backend",
        "error",
        "CPU offload needs a process group with a CPU backend",
        "Make the group with cpu:gloo beside nccl, as init_distributed does.",
    ),
    Rule(
        "SF501",
        "optimizer-before-sharding",
        "error",
        "the optimizer was built before sharding and holds parameters that the model no longer uses",
        "Build the optimizer after fully_shard, from the sharded model's parameters.",
    ),
    Rule(
        "SF503",
        "zero-grad-after-forward",
        "error",
        "gradients are cleared through the model between forward and backward",
        "Clear them before the forward, or through the optimizer.",
    ),
    Rule(
        "SF506",
        "gradient-sync-never-on",
        "error",
        "gradient reduction was turned off and is not on again for the last micro-batch",
        "Call sync_gradients(model, is_last) before each forward.",
    ),
    Rule(
        "SF508",
        "accumulated-loss-not-divided",
        "error",
        "the losses of micro-batches are summed instead of averaged",
        "Divide each by the number of micro-batches, or weight them by tokens as train_step does.",
    ),
    Rule(
        "SF509",
        "mean-over-local-tokens",
        "error",
        "each rank's or micro-batch's mean counts alike though they are over different numbers of items",
        "Weight each by its share of the items of the global batch: train_step(count=...).",
    ),
    Rule(
        "SF510",
        "gradients-averaged-twice",
        "error",
        "gradients are averaged over the ranks twice",
        "Drop the averaging by hand: FSDP2 averages in its reduction.",
    ),
    Rule(
        "SF511",
        "loss-divided-by-world",
        "error",
        "the loss is divided by the number of ranks as well",
        "Drop the division: FSDP2 averages gradients over the data ranks.",
    ),
    Rule(
        "SF512",
        "empty-parameter-group",
        "error",
        "a pattern of a parameter group matches no parameter",
        "Correct the pattern; sharding, compiling and checkpointing may change names.",
    ),
    Rule(
        "SF513",
        "parameter-in-no-group",
        "error",
        "a trainable parameter is in no group of the optimizer, or in two",
        "Add a group without match, which takes all that is left.",
    ),
    Rule(
        "SF521",
        "flattening-optimizer",
        "error",
        "the optimizer lays parameters into one flat tensor, which shards can't be",
        "Use an optimizer that updates each parameter by itself.",
    ),
    Rule(
        "SF601",
        "same-data-on-every-rank",
        "warning",
        "every rank trains on the same rows",
        "Give each data rank its own rows: slice_batch, or a sampler over the data axes.",
    ),
    Rule(
        "SF603",
        "sampler-over-tensor-axis",
        "error",
        "ranks of one tensor-parallel group get different samples",
        "Divide data over the data axes only: make_sampler, slice_batch.",
    ),
    Rule(
        "SF604",
        "uneven-batches",
        "error",
        "ranks have different numbers of batches, or one of them failed to load its own",
        "Iterate with lockstep(loader, ranks), which agrees on each step.",
    ),
    Rule(
        "SF605",
        "old-batch-size-on-each-rank",
        "error",
        "the batch size is not divided over the data ranks",
        "Give each rank local_batch_size(batch_size, ranks) rows, or slice the global batch.",
    ),
    Rule(
        "SF608",
        "same-noise-on-every-rank",
        "warning",
        "all data ranks draw the same dropout masks and noise",
        "Call rank_draws(model, ranks) after sharding.",
    ),
    Rule(
        "SF609",
        "evaluation-mode-left-on",
        "error",
        "training goes on in evaluation mode",
        "Call model.train() after each evaluation.",
    ),
    Rule(
        "SF630",
        "trains-differently",
        "error",
        "the candidate trains differently, and no known cause was recognised",
        "Start where it differs first: the step and the tensor that are named.",
    ),
    Rule(
        "SF631",
        "candidate-failed",
        "error",
        "the candidate did not run to its end",
        "Mend the error, or what its ranks wait for.",
    ),
    Rule(
        "SF632",
        "resume-starts-over",
        "error",
        "started again, the candidate begins at step 0",
        "Load the newest checkpoint at the start; an argument that asks for it goes into --resume-args.",
    ),
    Rule(
        "SF704",
        "fresh-optimizer-state-loaded",
        "error",
        "the optimizer's state was not restored",
        "Save and load it with the model (Checkpointer(optimizer=...)), after its state exists.",
    ),
    Rule(
        "SF705",
        "loaded-into-a-copy",
        "error",
        "after a resume the weights are not those that were saved",
        "Load into the model itself: set_model_state_dict, or Checkpointer.resume().",
    ),
    Rule(
        "SF708",
        "scheduler-left-out",
        "error",
        "a part of the training state is not in the checkpoint, and would start anew on resume",
        "Give model, optimizer, scheduler, scaler and loader to the checkpointer when saving and resuming.",
    ),
    Rule(
        "SF720",
        "unchecked-bytes",
        "error",
        "a file of the checkpoint is missing, torn or altered",
        "Restore it from a copy, or resume from another checkpoint.",
    ),
    Rule(
        "SF722",
        "writer-threads-swallow-errors",
        "error",
        "a checkpoint writer with several threads loses their errors",
        "Write with one thread a rank.",
    ),
    Rule(
        "SF728",
        "folder-name-differs-by-rank",
        "error",
        "the ranks save to folders with different names, so none of them is whole",
        "Choose the name on rank 0 and broadcast it, or take it from the launcher's run id.",
    ),
    Rule(
        "SF732",
        "unfinished-folder-as-newest",
        "error",
        "the folder is that of a save that did not end",
        "Resume from the newest committed checkpoint.",
    ),
    Rule(
        "SF733",
        "random-stream-not-restored",
        "error",
        "the random state was not restored on resume",
        "Save and restore torch's generator (Checkpointer does), on every rank.",
    ),
    Rule(
        "SF734",
        "loader-position-lost",
        "error",
        "after a resume training goes on with other data",
        "Save and restore the loader's position (Checkpointer(loader=...)).",
    ),
)

RULES: dict[str, Rule] = {rule.code: rule for rule in _TABLE}
