"""plan_units: what is found in a model's structure, with no process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from model_zoo import LIBRARY, PLAIN, Block, Branches, Experts, LanguageModel, Mixture, Reader, Shared, build
from shardfit import Plan, Precision, ShardfitError, Unit, plan_units
from shardfit.train.pieces import CAN_RUN_IN_PART


def paths(plan):
    return [unit.paths for unit in plan.units]


def holder(plan, path):
    """The unit that holds the module at `path`: the first that names it or something around it."""
    return next(u for u in plan.units if any(path == p or path.startswith(p + ".") or not p for p in u.paths))


def test_blocks_embedding_and_tail():
    plan = plan_units(LanguageModel())
    tail = ("norm", "head") if CAN_RUN_IN_PART else ("head",)
    assert paths(plan) == [("embed",), ("layers.0",), ("layers.1",), ("layers.2",), tail, ("",)]
    assert [unit.reshard for unit in plan.units] == [True, True, True, True, False, False]
    assert all(unit.why for unit in plan.units)
    assert sum(unit.num_params for unit in plan.units) == sum(p.numel() for p in LanguageModel().parameters())
    assert plan.units[-1].num_params == 8 * 16 + (0 if CAN_RUN_IN_PART else 2 * 16)  # the position table


def test_tied_weights_are_left_to_the_root():
    plan = plan_units(LanguageModel(tied=True))
    assert holder(plan, "embed") is holder(plan, "head") is plan.units[-1]
    assert "tied" in plan.units[-1].why


@pytest.mark.parametrize("kind", [*PLAIN, *LIBRARY])
def test_every_parameter_is_in_one_unit_and_the_same_on_shapes_alone(kind):
    model, _ = build(kind)
    plan = plan_units(model)
    assert sum(unit.num_params for unit in plan.units) == sum(p.numel() for p in model.parameters())
    with torch.device("meta"):
        meta, _ = build(kind)
    assert plan_units(meta) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


def test_fake_tensors_are_shapes_too():
    with FakeTensorMode(), torch.device("cpu"):
        fake = LanguageModel()
    assert plan_units(fake) == plan_units(LanguageModel())


EXPECTED_BLOCKS = {
    "llama": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.encoder.layer.2"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "mixtral": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "mamba": ["backbone.layers.0", "backbone.layers.1", "backbone.layers.2"],
    "swin": [f"swin.encoder.layers.{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)],
    "resnet": [f"resnet.encoder.stages.{s}.layers.{b}" for s in (0, 1) for b in (0, 1)],
    "translator": [f"transformer.{s}.layers.{b}" for s in ("encoder", "decoder") for b in (0, 1)],
    "mixture": ["layers.0", "layers.1"],
}


@pytest.mark.parametrize("kind", EXPECTED_BLOCKS)
def test_blocks_are_found_by_structure(kind):
    plan = plan_units(build(kind)[0])
    blocks = [path for unit in plan.units if "repeated block" in unit.why for path in unit.paths]
    assert blocks == EXPECTED_BLOCKS[kind]


def test_numbered_attributes_counted_keys_and_stages():
    class Stages(nn.Module):
        """As torchvision's ResNet: the first block of a stage has another shape."""

        def __init__(self):
            super().__init__()
            self.layer1 = nn.Sequential(Block(8), Block(8))
            self.layer2 = nn.Sequential(Widen(8, 16), Block(16), Block(16))
            self.step_1, self.step_2 = Block(16), Block(16)
            self.more = nn.ModuleDict({"0": Block(16), "1": Block(16)})

        def forward(self, x):
            return self.layer2(self.layer1(x))

    class Widen(Block):
        def __init__(self, inner, outer):
            super().__init__(outer)
            self.skip = nn.Linear(inner, outer)

    blocks = {
        path for unit in plan_units(Stages()).units for path in unit.paths if "repeated block" in unit.why
    }
    expected = {"layer1.0", "layer1.1", "layer2.1", "layer2.2", "step_1", "step_2", "more.0", "more.1"}
    assert expected <= blocks


def test_a_repetition_of_stages_is_taken_apart():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    plan = plan_units(nn.Sequential(Stage(), Stage()))
    assert paths(plan)[:-1] == [(f"{s}.blocks.{b}",) for s in (0, 1) for b in range(4)]


def test_experts_are_never_units():
    plan = plan_units(Mixture())
    assert not any("experts" in path for unit in plan.units for path in unit.paths)
    big = nn.Sequential(Experts(count=6), Experts(count=6))
    assert paths(plan_units(big))[:2] == [("0",), ("1",)]

    class Routed(nn.Module):
        """The same without the telling name: something beside has one output for each item."""

        def __init__(self):
            super().__init__()
            self.choose = nn.Linear(16, 5)
            self.parts = nn.ModuleList([Block() for _ in range(5)])

        def forward(self, x):
            return self.parts[self.choose(x).argmax()](x)

    assert paths(plan_units(nn.Sequential(Routed(), Routed())))[:2] == [("0",), ("1",)]


def test_small_neighbours_are_joined():
    model = LanguageModel(dim=8, depth=40)
    units = [unit for unit in plan_units(model).units if "repeated block" in unit.why]
    whole = sum(p.numel() for p in model.parameters())
    assert len(units) < 20
    assert [path for unit in units for path in unit.paths] == [f"layers.{i}" for i in range(40)]
    assert all(whole / 16 <= unit.num_params < whole / 4 for unit in units)


def test_large_models_keep_a_unit_for_each_block():
    with torch.device("meta"):
        model = LanguageModel(dim=1024, depth=40, vocab=50_000)
    plan = plan_units(model)
    assert len(plan.units) == 43
    assert holder(plan, "embed").num_params == 1024 * 50_000


def test_a_weight_that_another_forward_reads():
    plan = plan_units(Reader())
    assert holder(plan, "head") is plan.units[-1]
    assert "read by the forward of the root" in plan.units[-1].why

    class Metadata(Reader):
        def score(self, x):
            return self.head(x.to(self.head.weight.dtype))

    assert holder(plan_units(Metadata()), "head").paths == ("head",)
    # nn.MultiheadAttention reads its out_proj without calling it, in each of these layers.
    plan = plan_units(nn.Transformer(16, 2, 2, 2, 32, batch_first=True))
    assert not any("out_proj" in path for unit in plan.units for path in unit.paths)


def test_alternatives_are_one_unit():
    plan = plan_units(Branches())
    assert holder(plan, "left") is holder(plan, "right")


def test_modules_that_several_blocks_share():
    plan = plan_units(Shared())
    assert ("users.0.shared",) in paths(plan)
    assert ("again.0",) in paths(plan)
    assert not any("again.1" in p for p in paths(plan))


def test_parameters_that_blocks_share():
    model = LanguageModel(depth=4)
    model.layers[2].up.weight = model.layers[0].up.weight
    plan = plan_units(model)
    assert ("layers.0", "layers.2") in paths(plan)
    assert ("layers.1",) in paths(plan)
    model.head.weight = nn.Parameter(torch.randn(32, 16))
    model.layers[3].up.weight = model.head.weight
    assert holder(plan_units(model), "layers.3").paths == ("",)


def test_one_module_and_no_parameters():
    assert paths(plan_units(nn.Linear(3, 3))) == [("",)]
    assert paths(plan_units(nn.ReLU())) == [("",)]
    assert paths(plan_units(nn.Sequential(nn.Linear(3, 3)))) == [("",)]


def test_by_hand():
    model = LanguageModel()
    plan = plan_units(model, units=["layers.*", ["norm", "head"]])
    assert paths(plan) == [("layers.0",), ("layers.1",), ("layers.2",), ("norm", "head"), ("",)]
    nested = plan_units(model, units=["layers.0", "layers.?.up", Unit(paths=("embed",), reshard=False)])
    assert paths(nested)[:2] == [("layers.0.up",), ("layers.0",)]
    assert nested.units[-2].reshard is False
    assert paths(plan_units(model, units=[])) == [("",)]
    assert paths(plan_units(model, units=[""])) == [("",)]
    # A shared block once, whichever of its paths is meant.
    assert paths(plan_units(Shared(), units=["again.*"])) == [("again.0",), ("",)]


def test_by_hand_and_wrong():
    with pytest.raises(ShardfitError, match=r"matches no module\n.*layrs\.\*.*layers"):
        plan_units(LanguageModel(), units=["layrs.*"])
    with pytest.raises(ShardfitError, match="lazy"):
        plan_units(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ShardfitError, match="SF319"):
        plan_units(LanguageModel(), units=["layers.*", "layers.0"])


def test_plans_are_the_same_in_every_process():
    """Down to the words: nothing depends on the order of a set."""
    code = "from model_zoo import build; from shardfit import plan_units; "
    code += "print([plan_units(build(k)[0]) for k in ('tied', 'reader', 'shared')])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(texts) == 1


def test_the_model_is_only_looked_at():
    model = LanguageModel(tied=True)
    before = {n: (id(p), p.clone()) for n, p in model.named_parameters()}
    plan = plan_units(model, precision=Precision(param="bfloat16"), checkpointing="full", methods=["encode"])
    assert plan.precision.master == "float32"
    assert plan.methods == ("encode",)
    for n, p in model.named_parameters():
        assert before[n][0] == id(p)
        assert torch.equal(before[n][1], p)
