"""Every way in which a plan can be applied trains as one process does."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from model_zoo import LIBRARY, LanguageModel, build, run
from ranks import run_ranks
from shardfit import Precision, ShardfitError, Unit, plan_of, plan_units, shard
from test_shard import train_both


@pytest.mark.parametrize(
    "options",
    [
        {"offload": True},
        {"prefetch": 1},
        {"prefetch": 3},
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"units": [Unit(paths=("layers.0",), reshard=False), "layers.1", ["norm", "head"]]},
        {"units": ["layers.*", "layers.*.up", "embed"]},
        {"units": []},
    ],
    ids=str,
)
def test_two_ranks(options):
    results = run_ranks(train_both, kind="language model", steps=3, **options)
    assert all(worst < 2e-5 for worst, _ in results), results


def test_one_process():
    assert run_ranks(train_both, world=1, kind="language model")[0][0] < 2e-5


def test_hybrid_and_partial_reshard():
    results = run_ranks(train_both, world=4, init={"replicate": 2}, kind="language model")
    assert all(worst < 2e-5 for worst, _ in results), results
    units = [Unit(paths=(f"layers.{i}",), reshard=2) for i in range(3)]
    results = run_ranks(train_both, world=4, kind="language model", units=units)
    assert all(worst < 2e-5 for worst, _ in results), results


def tensor_parallel(ranks, tied):
    model, inputs = build("tied" if tied else "language model")
    alone = copy.deepcopy(model)
    split = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, ranks.mesh["tensor"], split)
    shard(model, plan_units(model), ranks)
    up = model.layers[0].up.weight
    assert up.device_mesh.mesh_dim_names == ("shard", "tensor")
    assert up.to_local().numel() == up.numel() // 4
    rows = 4 // ranks.data_world
    start = ranks.data_rank * rows
    run(model, inputs, start, start + rows).backward()
    run(alone, inputs).backward()
    expected = dict(alone.named_parameters())
    return max(
        ((p.grad.full_tensor() - expected[n].grad).abs().max() / expected[n].grad.abs().max()).item()
        for n, p in model.named_parameters()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_over_the_data_axes_of_a_mesh_with_a_tensor_axis(tied):
    results = run_ranks(tensor_parallel, world=4, init={"tensor": 2}, tied=tied)
    assert max(results) < 2e-5


def low_tensor_parallel(ranks):
    model = LanguageModel().bfloat16()
    parallelize_module(model, ranks.mesh["tensor"], {"layers.*.up": ColwiseParallel()})
    with pytest.raises(ShardfitError, match=r"SF402[\s\S]*layers\.0\.up\.weight"):
        shard(model, plan_units(model, precision=Precision(param="bfloat16")), ranks)


def test_a_low_precision_master_on_the_tensor_axis_is_refused():
    run_ranks(low_tensor_parallel, init={"tensor": 2})


def precisions(ranks):
    model = LanguageModel().bfloat16()
    model.layers[1].requires_grad_(False)
    plan = plan_units(model, precision=Precision(param="bfloat16", output="float32"))
    shard(model, plan, ranks)
    seen = []
    model.layers[0].up.register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, m.weight.dtype)))
    output = model(torch.zeros(2, 8, dtype=torch.long))
    output.mean().backward()
    return {
        "stored": {n: p.dtype for n, p in model.named_parameters()},
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None},
        "computed": seen[0],
        "output": output.dtype,
    }


def test_low_precision_computes_low_and_keeps_float32_masters():
    result = run_ranks(precisions)[0]
    frozen = {n: d for n, d in result["stored"].items() if n.startswith("layers.1.")}
    assert set(frozen.values()) == {torch.bfloat16}
    assert {d for n, d in result["stored"].items() if n not in frozen} == {torch.float32}
    assert result["gradients"] == {torch.float32}
    assert result["computed"] == (torch.bfloat16, torch.bfloat16)
    assert result["output"] == torch.float32


def low_library(ranks):
    """Losses of the kinds of model that compute in bf16, and of one process in float32."""
    losses = {}
    for kind in LIBRARY:
        model, inputs = build(kind)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "use_cache", None):
                module.config.use_cache = False
        alone = run(model, inputs).item()
        try:
            plan = plan_units(model, precision=Precision(param="bfloat16"), checkpointing="full")
            shard(model, plan, ranks)
        except ShardfitError as error:
            losses[kind] = str(error)
            continue
        loss = run(model, inputs)
        loss.float().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}, kind
        losses[kind] = (loss.item(), alone)
    return losses


def test_library_models_in_low_precision_with_checkpointing():
    losses = run_ranks(low_library)[0]
    assert "SF409" in losses.pop("resnet")
    for kind, (ours, alone) in losses.items():
        assert ours == pytest.approx(alone, rel=0.02), kind


def low_rank(ranks):
    """A frozen bf16 base with trainable fp32 adapters in one unit."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).bfloat16().requires_grad_(False)
            self.adapter = nn.Linear(16, 16)

        def forward(self, x):
            return self.base(x.bfloat16()).float() + self.adapter(x)

    model = nn.Sequential(*[Adapted() for _ in range(3)])
    alone = copy.deepcopy(model)
    shard(model, plan_units(model), ranks)
    x = torch.randn(2, 16)
    model(x).square().mean().backward()
    alone(x).square().mean().backward()
    expected = dict(alone.named_parameters())
    for n, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad.full_tensor(), expected[n].grad)
        else:
            assert p.grad is None
            assert p.dtype == torch.bfloat16
    return plan_of(model).units[0].paths


def test_a_frozen_low_precision_base_with_adapters():
    assert run_ranks(low_rank) == [("0",), ("0",)]


def recomputed(ranks, how):
    model, inputs = build("language model")
    names = [n for n, _ in model.named_parameters()]
    shard(model, plan_units(model, checkpointing=how), ranks)
    assert [n for n, _ in model.named_parameters()] == names
    calls = {"norm": 0, "up": 0}

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    model.layers[0].norm.register_forward_hook(count("norm"))
    model.layers[0].up.register_forward_hook(count("up"))
    with torch.no_grad():
        run(model, inputs)
    quiet = dict(calls)
    run(model, inputs).backward()
    return quiet, calls


def test_checkpointing_recomputes_blocks_in_backward_only():
    quiet, calls = run_ranks(recomputed, how="full")[0]
    assert quiet == {"norm": 1, "up": 1}
    assert calls == {"norm": 3, "up": 3}


def saved_bytes(ranks, how):
    """Bytes that autograd keeps for backward."""
    model = LanguageModel(depth=4)
    shard(model, plan_units(model, checkpointing=how), ranks)
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.zeros(8, 8, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        loss = model(x).square().mean()
    loss.backward()
    return sum(kept.values())


def test_checkpointing_keeps_less():
    none, selective, full = (run_ranks(saved_bytes, how=how)[0] for how in ("none", "selective", "full"))
    assert full < none
    assert selective < none


def compiled(ranks):
    from unittest import mock

    eager = torch.compile
    used = []

    def compile_eagerly(function, **options):
        def backend(graph, example):
            used.append(len(list(graph.graph.nodes)))
            return graph

        return eager(function, backend=backend, **options)

    # The warning is dynamo's own.
    with mock.patch("torch.compile", compile_eagerly), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return [
            train_both(ranks, "language model", steps=3, compile=True, **more)[0]
            for more in ({}, {"checkpointing": "full"})
        ], len(used)


def test_blocks_compile_in_place():
    for worst, graphs in run_ranks(compiled):
        assert max(worst) < 2e-5
        assert graphs > 0


def compiled_whole(ranks):
    """The user compiles the sharded model himself."""
    model, inputs = build("language model")
    alone = copy.deepcopy(model)
    shard(model, None, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own, of graph breaks and .grad
        call = torch.compile(model, backend="eager")
        losses = []
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
        for _ in range(3):
            pair = [run(m, inputs) for m in (call, alone)]
            with torch.no_grad():
                run(call, inputs)
            for loss, optimizer in zip(pair, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append([loss.item() for loss in pair])
    return losses


def test_a_sharded_model_may_be_compiled_whole():
    for ours, theirs in run_ranks(compiled_whole)[0]:
        assert ours == pytest.approx(theirs, rel=1e-5)


def methods(ranks):
    model, inputs = build("language model")
    alone = copy.deepcopy(model)
    shard(model, plan_units(model, methods=["encode", "generate"]), ranks)
    tokens = inputs["x"]
    same = [torch.equal(model.encode(tokens), alone.encode(tokens))]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reference = torch.optim.SGD(alone.parameters(), lr=1.0)
    for _ in range(2):
        with torch.no_grad():
            for name in ("encode", "generate"):
                ours, theirs = (getattr(m, name)(tokens) for m in (model, alone))
                same.append(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5))
        for m, o in ((model, optimizer), (alone, reference)):
            o.zero_grad()
            m.encode(tokens).square().mean().backward()
            run(m, inputs).backward()
            o.step()
    return same


def test_other_methods_count_as_forward():
    assert run_ranks(methods) == [[True] * 5] * 2


def lookups(ranks, checkpointed):
    """The embedding's table is gathered once a step: backward doesn't need it."""
    model = LanguageModel(vocab=400)
    alone = copy.deepcopy(model)
    shard(model, plan_units(model), ranks)
    assert any(u.paths == ("embed",) for u in plan_of(model).units)
    x = torch.randint(0, 400, (2, 8))
    losses = []
    for m in (model, alone):
        if checkpointed:
            hidden = torch.utils.checkpoint.checkpoint(
                lambda x, m=m: m(x).square().mean(), x, use_reentrant=False
            )
        else:
            hidden = m(x).square().mean()
        hidden.backward()
        losses.append(hidden.item())
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), alone.embed.weight.grad)
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight.placements == (Shard(0),)
    return losses


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_table_of_a_lookup_is_not_gathered_for_backward(checkpointed):
    for ours, theirs in run_ranks(lookups, checkpointed=checkpointed):
        assert ours == pytest.approx(theirs, rel=1e-6)
