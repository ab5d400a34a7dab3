"""load_weights: whole files into shards, each rank its own rows."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from model_zoo import LanguageModel
from ranks import run_ranks
from shardfit import Precision, ShardfitError, load_weights, plan_units, shard


def source_model(tied=False):
    torch.manual_seed(7)
    model = LanguageModel(vocab=41, tied=tied)  # 41 rows: not even over two or four ranks
    model.register_buffer("steps", torch.tensor(5))
    return model


def save(folder, form, *, tied=False, dtype=None, change=None):
    """Saved weights of `source_model`; `change` edits the state dict first."""
    state = {n: t.clone() for n, t in source_model(tied).state_dict().items()}
    if tied:
        del state["head.weight"]  # as transformers leaves tied keys out
    if dtype:
        state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
    if change:
        change(state)
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if form == "sharded":
        names = sorted(state)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({n: state[n] for n in part}, folder / file)
        weight_map = {n: file for file, part in parts.items() for n in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"older": torch.zeros(1)}, folder / "older.safetensors")
        return folder
    if form == "old torch":
        torch.save(state, folder / "w.pt", _use_new_zipfile_serialization=False)
        return folder / "w.pt"
    content = {"model": state, "step": 3} if form == "nested torch" else state
    torch.save(content, folder / "w.pt")
    return folder / "w.pt"


def load_sharded(ranks, source, tied=False, precision=None, tensor=False):
    torch.manual_seed(0)
    model = LanguageModel(vocab=41, tied=tied)
    model.register_buffer("steps", torch.tensor(0))
    if tensor:
        split = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, ranks.mesh["tensor"], split)
    shard(model, plan_units(model, precision=precision or Precision()), ranks)
    result = load_weights(model, source)
    expected = source_model(tied).state_dict()
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        tolerance = 0 if not result.casts else 1e-2
        torch.testing.assert_close(whole, expected[name], rtol=tolerance, atol=tolerance)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    return result


@pytest.mark.parametrize("form", ["safetensors", "sharded", "torch", "nested torch", "old torch"])
def test_whole_files_into_shards(tmp_path, form):
    result = run_ranks(load_sharded, source=save(tmp_path, form))[0]
    assert result.missing == result.unexpected == ()
    assert not result.casts
    assert "layers.2.down.bias" in result.loaded


def test_over_four_ranks_copies_and_a_tensor_axis(tmp_path):
    file = save(tmp_path, "safetensors")
    run_ranks(load_sharded, world=4, source=file)
    run_ranks(load_sharded, world=4, init={"replicate": 2}, source=file)
    run_ranks(load_sharded, world=4, init={"tensor": 2}, source=file, tensor=True)


def test_a_tied_key_that_was_left_out(tmp_path):
    result = run_ranks(load_sharded, source=save(tmp_path, "safetensors", tied=True), tied=True)[0]
    assert result.missing == ()


def test_another_dtype_is_cast_and_said(tmp_path):
    file = save(tmp_path, "safetensors", dtype=torch.bfloat16)
    result = run_ranks(load_sharded, source=file, precision=Precision(param="bfloat16"))[0]
    assert result.casts["norm.weight"] == "bfloat16 -> float32"


def shard_and_load(ranks, source, tied):
    with torch.device("meta"):
        model = LanguageModel(vocab=41, tied=tied)
        model.register_buffer("steps", torch.tensor(0))
    model.norm.weight.decay = False
    shard(model, None, ranks, weights=source)
    assert model.norm.weight.decay is False
    before = [p.to_local().data_ptr() for p in model.parameters()]
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert before == [p.to_local().data_ptr() for p in model.parameters()]
    expected = source_model(tied).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])
    return (model.head.weight is model.embed.weight) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_a_meta_model_is_loaded_and_never_initialised(tmp_path, tied):
    file = save(tmp_path, "safetensors", tied=tied)
    assert run_ranks(shard_and_load, source=file, tied=tied) == [True, True]
    assert run_ranks(shard_and_load, world=1, source=file, tied=tied) == [True]


def load_broken(ranks, source, tied=False):
    torch.manual_seed(0)
    model = shard(LanguageModel(vocab=41, tied=tied), None, ranks)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    try:
        load_weights(model, source)
    except ShardfitError as error:
        assert all(torch.equal(before[n], p.full_tensor()) for n, p in model.named_parameters())
        return str(error)
    return None


def test_everything_that_does_not_fit_is_said_and_nothing_written(tmp_path):
    def change(state):
        state["norm.weight"] = torch.zeros(17)
        state["extra"] = torch.zeros(2)
        state["positions"] = torch.zeros(8, 16, dtype=torch.int64)
        del state["layers.1.up.bias"]

    for message in run_ranks(load_broken, source=save(tmp_path, "safetensors", change=change)):
        assert "norm.weight: stored [17], model [16]" in message
        assert "positions: stored torch.int64, model torch.float32" in message
        assert "missing: layers.1.up.bias" in message
        assert "unexpected: extra" in message
        assert "unexpected: steps" in message
        assert "nothing was written" in message


def test_tied_weights_that_are_stored_apart(tmp_path):
    def change(state):
        del state["steps"]
        # In the last row, which one of the ranks holds.
        state["head.weight"] = state["embed.weight"].clone()
        state["head.weight"][-1] += 1

    file = save(tmp_path, "safetensors", tied=True, change=change)
    messages = run_ranks(load_broken, source=file, tied=True)
    assert all("SF204" in message and "embed.weight and head.weight" in message for message in messages)


def test_torn_files(tmp_path):
    file = save(tmp_path, "safetensors")
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ShardfitError, match="not a whole safetensors file"):
            load_weights(source_model(), file)
    file = save(tmp_path, "torch")
    whole = file.read_bytes()
    for size in (0, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ShardfitError, match="can't be read as saved weights"):
            load_weights(source_model(), file)


def test_nothing_there(tmp_path):
    with pytest.raises(ShardfitError, match="no weights"):
        load_weights(source_model(), tmp_path / "none")
    with pytest.raises(ShardfitError, match="no weight files"):
        load_weights(source_model(), tmp_path)
    save(tmp_path, "sharded")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ShardfitError, match=r"not there\n.*b\.safetensors"):
        load_weights(source_model(), tmp_path)


def test_names_are_mapped_and_dropped(tmp_path):
    def change(state):
        for name in list(state):
            state[f"module.{name}"] = state.pop(name)
        state["ema"] = torch.zeros(1)

    file = save(tmp_path, "safetensors", change=change)
    model = source_model()
    nn.init.zeros_(model.positions)
    load_weights(model, file, rename=lambda name: name.removeprefix("module.") if name != "ema" else None)
    assert torch.equal(model.positions, source_model().positions)
    partial = load_weights(model, file, strict=False)
    assert len(partial.missing) == len(partial.unexpected) - 1
    with pytest.raises(ShardfitError, match="same name after renaming"):
        load_weights(model, file, rename=lambda name: "norm.weight")


def test_weights_of_any_kind(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("flag", torch.tensor(True))
            self.register_buffer("none", torch.zeros(0, 3))
            self.register_buffer("low", torch.randn(3, 2).half())
            self.weight = nn.Parameter(torch.randn(2, 3).t())

    saved, model = Odd(), Odd()
    save_file({n: t.contiguous() for n, t in saved.state_dict().items()}, tmp_path / "m.safetensors")
    model.flag.fill_(False)
    load_weights(model, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name]), name
