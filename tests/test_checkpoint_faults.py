"""What can't be loaded or saved is refused: on all ranks alike, by name, with nothing touched."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from shardfit import Checkpointer, Manifest, ShardfitError
from shardfit.checkpoint.verify import verify
from shardfit.train.random import random_state
from test_checkpoint import build, snapshot, train

SHARD = "step-00000003/__1_0.distcp"


def fill_body(ranks, folder):
    parts = build(ranks)
    train(*parts, range(3))
    model, optimizer, scheduler = parts
    Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler).save(3)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    run_ranks(fill_body, world=2, folder=folder)
    return folder


def everything(parts):
    """What a refused load must leave as it was, to the bit."""
    return [snapshot(*parts), random_state()]


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool((one == other).all()) if hasattr(one, "all") else one == other


def refusals_body(ranks, folders):
    """The error of `resume` from each folder, and whether it changed anything."""
    parts = build(ranks, seed=5)
    train(*parts, range(2))
    model, optimizer, scheduler = parts
    before = everything(parts)
    results = []
    for folder in folders:
        error = None
        try:
            Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler).resume()
        except ShardfitError as raised:
            error = (raised.code, str(raised))
        results.append((error, equal(before, everything(parts))))
    return results


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def edit(file, **changes):
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, **changes}))


DAMAGE = {
    "a flipped byte": (lambda f: flip(f / SHARD), "SF720", "__1_0.distcp: its content has changed"),
    "a torn file": (lambda f: cut(f / SHARD), "SF720", "__1_0.distcp: "),
    "a missing file": (lambda f: (f / SHARD).unlink(), "SF720", "__1_0.distcp: missing"),
    "a flipped byte in the index": (lambda f: flip(f / "step-00000003/.metadata"), "SF720", ".metadata: its"),
    "a changed state": (lambda f: flip(f / "step-00000003/state.json"), "SF720", "state.json: its content"),
    "one rank's own": (lambda f: flip(f / "step-00000003/rank-00001.json"), "SF720", "rank-00001.json: its"),
    "an altered manifest": (
        lambda f: edit(f / "step-00000003/manifest.json", world=4),
        "SF720",
        "its digest",
    ),
    "another version": (lambda f: edit(f / "step-00000003/manifest.json", version=7), None, "version 7"),
    "another kind": (
        lambda f: edit(f / "step-00000003/manifest.json", format="x"),
        None,
        "not the manifest of a shardfit",
    ),
}


def test_damage_is_refused_and_nothing_is_touched(good, tmp_path):
    folders = []
    for number, (damage, _, _) in enumerate(DAMAGE.values()):
        folders.append(tmp_path / str(number))
        shutil.copytree(good, folders[-1])
        damage(folders[-1])
    # Two faults at once are both named.
    shutil.copytree(good, tmp_path / "both")
    flip(tmp_path / "both" / SHARD)
    cut(tmp_path / "both/step-00000003/state.json")
    by_rank = run_ranks(refusals_body, world=2, folders=[*folders, tmp_path / "both"])
    assert by_rank[0] == by_rank[1]
    *single, both = by_rank[0]
    for (error, untouched), (name, (_, code, text)) in zip(single, DAMAGE.items(), strict=True):
        assert error is not None, name
        assert error[0] == code, name
        assert text in error[1], (name, error[1])
        assert untouched, name
    assert "__1_0.distcp" in both[0][1]
    assert "state.json" in both[0][1]
    assert both[1]


def test_a_folder_without_any(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("there", "not there"):
        assert Checkpointer(tmp_path / name, model=nn.Linear(2, 2)).resume() is None
        assert Checkpointer(tmp_path / name, model=nn.Linear(2, 2)).latest() is None
    with pytest.raises(ShardfitError, match="no committed checkpoint of step 5"):
        Checkpointer(tmp_path / "there", model=nn.Linear(2, 2)).resume(5)


def test_sizes_alone_where_digests_are_not_wanted(good, tmp_path):
    shutil.copytree(good, tmp_path / "copy")
    cut(tmp_path / "copy" / SHARD)
    model, optimizer, scheduler = build()
    checkpointer = Checkpointer(tmp_path / "copy", model=model, optimizer=optimizer, scheduler=scheduler)
    with pytest.raises(ShardfitError, match="__1_0"):
        checkpointer.resume(verify=False)
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(good, tmp_path / "copy")
    assert checkpointer.resume(verify=False) == 3


# ---- a whole checkpoint that does not fit


class Small(nn.Module):
    def __init__(self, width=4, extra=False, norm=True):
        super().__init__()
        self.one = nn.Linear(3, width)
        if norm:
            self.norm = nn.LayerNorm(width)
        if extra:
            self.more = nn.Linear(2, 2)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.fixture
def small(tmp_path):
    model = Small()
    optimizer = adam(model)
    step(model, optimizer)
    Checkpointer(tmp_path / "small", model=model, optimizer=optimizer).save(1)
    return tmp_path / "small"


def refused(folder, model, **parts):
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ShardfitError) as caught:
        Checkpointer(folder, model=model, **parts).resume()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return str(caught.value)


def test_another_shape_missing_and_unexpected_all_at_once(small):
    text = refused(small, Small(width=5, extra=True, norm=False))
    for part in (
        "one.weight: shape (4, 3) in it, (5, 3) in the model",
        "one.bias: shape (4,) in it, (5,) in the model",
        "2 tensors of the model are missing in it: more.bias, more.weight",
        "it has 2 tensors that the model has not: norm.bias, norm.weight",
    ):
        assert part in text


def test_another_dtype(small):
    assert "one.weight: float32 in it, bfloat16 in the model" in refused(small, Small().to(torch.bfloat16))


def test_an_optimizer_of_other_parameters(small):
    model = Small()
    text = refused(small, model, optimizer=torch.optim.AdamW([model.one.weight], lr=0.1))
    assert "saved with the optimizer, which has not got them now: norm.bias, norm.weight, one.bias" in text
    with pytest.raises(ShardfitError, match="SF501"):
        Checkpointer(small, model=model, optimizer=adam(Small())).resume()
    with pytest.raises(ShardfitError, match="SF501"):
        Checkpointer(small.parent / "other", model=model, optimizer=adam(Small())).save(1)


def test_groups_that_join_what_differed(tmp_path):
    model = Small()
    groups = [
        {"params": [model.one.weight], "lr": 0.3},
        {"params": [model.one.bias, *model.norm.parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    Checkpointer(tmp_path, model=model, optimizer=optimizer).save(1)
    text = refused(tmp_path, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert "group 0 of the optimizer: lr was 0.3 for 'one.weight' and 0.1 for 'one.bias'" in text


def test_parts_that_were_not_saved(small):
    model = Small()
    optimizer = adam(model)
    text = refused(
        small,
        model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        scaler=torch.amp.GradScaler("cpu"),
        loader=Position(),
        extra={"best": 0},
    )
    assert text.startswith("SF708")
    for part in ("scheduler", "scaler", "loader", "extra 'best'"):
        assert f"{part} given, but not in the checkpoint" in text


def test_parts_that_nobody_takes_are_said(tmp_path):
    model = Small()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    Checkpointer(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler).save(1)
    with pytest.warns(UserWarning, match="also holds scheduler"):
        Checkpointer(tmp_path, model=model, optimizer=optimizer).resume()
    Checkpointer(tmp_path, model=model).resume()  # weights alone: nothing to say


def test_ties_that_differ(tmp_path):
    def pair(tied):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    for tied, said in ((True, "were tied when it was saved, and are not now"), (False, "are tied now")):
        folder = tmp_path / str(tied)
        Checkpointer(folder, model=pair(tied)).save(1)
        assert said in refused(folder, pair(not tied))


def test_a_model_without_weights(small):
    with torch.device("meta"):
        model = Small()
    for act in (lambda c: c.resume(), lambda c: c.save(2)):
        with pytest.raises(ShardfitError, match=r"SF201(.|\n)*one.weight"):
            act(Checkpointer(small, model=model))


class Position:
    """A loader's position, in one number."""

    def __init__(self, at=0, broken=False):
        self.at, self.broken = at, broken

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
        if self.broken:
            raise RuntimeError("no such position")


def test_a_part_that_refuses_its_state_leaves_the_others_as_they_were(tmp_path):
    def parts(at, broken=False):
        model = Small()
        optimizer = adam(model)
        step(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        extra = {"a": Position(at), "b": Position(at, broken), "value": at}
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": extra}

    saved = parts(5)
    saved["optimizer"].step()
    saved["scheduler"].step()
    Checkpointer(tmp_path, **saved).save(1)
    live = parts(2, broken=True)
    weights = [p.clone() for p in live["model"].parameters()]
    with pytest.raises(ShardfitError, match="no such position"):
        Checkpointer(tmp_path, **live).resume()
    assert all(torch.equal(p, w) for p, w in zip(live["model"].parameters(), weights, strict=True))
    assert live["scheduler"].last_epoch == 0
    assert live["extra"]["a"].at == live["extra"]["value"] == 2


# ---- saves that fail


def failing_save_body(ranks, folder, fault):
    """A save that fails on rank 1 (or the first), after one that did not."""
    parts = build(ranks)
    train(*parts, range(1))
    model, optimizer, scheduler = parts
    extra = {"value": 1}
    checkpointer = Checkpointer(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, keep=1
    )
    checkpointer.save(1)
    train(*parts, range(1, 2))
    before = everything(parts)
    undo = FAULTS[fault](ranks, extra)
    error = None
    try:
        checkpointer.save(2)
    except ShardfitError as raised:
        error = str(raised)
    undo()
    dist.barrier()
    listing = sorted(os.listdir(folder))
    untouched = equal(before, everything(parts))
    dist.barrier()
    checkpointer.save(2)
    dist.barrier()
    return error, listing, untouched, sorted(os.listdir(folder))


def full_disk_in_tensors(ranks, extra):
    """Rank 1's shards don't fit: an error in the middle of torch's writer."""
    save = torch.save
    if ranks.rank == 1:

        def fail(value, stream, *args, **kwargs):
            stream.write(b"half")
            raise OSError(28, "No space left on device")

        torch.save = fail
    return lambda: setattr(torch, "save", save)


def full_disk_in_sync(ranks, extra):
    sync = os.fsync
    if ranks.rank == 1:

        def fail(descriptor):
            raise OSError(28, "No space left on device")

        os.fsync = fail
    return lambda: setattr(os, "fsync", sync)


def full_disk_in_own_file(ranks, extra):
    """Past torch's writer: what rank 1 has of its own does not fit."""
    replace = os.replace
    if ranks.rank == 1:

        def fail(old, new):
            raise OSError(28, "No space left on device")

        os.replace = fail
    return lambda: setattr(os, "replace", replace)


def full_disk_in_commit(ranks, extra):
    rename = os.rename
    if ranks.rank == 0:

        def fail(old, new):
            raise OSError(28, "No space left on device")

        os.rename = fail
    return lambda: setattr(os, "rename", rename)


def no_permission(ranks, extra):
    mkdir = os.mkdir

    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    if ranks.rank == 0:
        os.mkdir = fail
    return lambda: setattr(os, "mkdir", mkdir)


def unstorable(ranks, extra):
    if ranks.rank == 1:
        extra["value"] = print
    return lambda: extra.update(value=1)


def refusing_part(ranks, extra):
    class Refuses(Position):
        def state_dict(self):
            raise RuntimeError("not now")

    if ranks.rank == 1:
        extra["value"] = Refuses()
    return lambda: extra.update(value=1)


FAULTS = {
    "full_disk_in_tensors": full_disk_in_tensors,
    "full_disk_in_sync": full_disk_in_sync,
    "full_disk_in_own_file": full_disk_in_own_file,
    "full_disk_in_commit": full_disk_in_commit,
    "no_permission": no_permission,
    "unstorable": unstorable,
    "refusing_part": refusing_part,
}
SAID = {"unstorable": "extra.value is a builtins.builtin_function", "refusing_part": "not now"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_on_one_rank_fails_on_all(fault, tmp_path):
    results = run_ranks(failing_save_body, world=2, folder=tmp_path, fault=fault)
    assert results[0] == results[1]
    error, listing, untouched, after = results[0]
    assert error is not None
    assert SAID.get(fault, "Permission" if fault == "no_permission" else "No space left") in error
    assert ("rank 1" in error) == (fault not in ("full_disk_in_commit", "no_permission"))
    assert listing == ["step-00000001"]
    assert untouched
    assert after == ["step-00000002"]
    assert verify(tmp_path / "step-00000002").findings == ()
    assert Manifest.read(tmp_path / "step-00000002").world == 2


def different_body(ranks, folder, by_rank):
    checkpointer = Checkpointer(f"{folder}/{by_rank['folder'][ranks.rank]}", model=nn.Linear(2, 2))
    try:
        checkpointer.save(by_rank["step"][ranks.rank])
    except ShardfitError as error:
        return error.code, str(error)
    return None


def test_ranks_that_do_not_agree(tmp_path):
    for by_rank, code, said in (
        ({"folder": "ab", "step": (1, 1)}, "SF728", "rank 1: "),
        ({"folder": "aa", "step": (1, 2)}, None, "rank 0: 1, rank 1: 2"),
    ):
        results = run_ranks(different_body, world=2, folder=tmp_path, by_rank=by_rank)
        assert results[0] == results[1]
        assert results[0][0] == code
        assert said in results[0][1]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step_number", [-1, 1.5, "3", None])
def test_a_step_that_is_no_number(step_number, tmp_path):
    with pytest.raises(ShardfitError, match="whole number"):
        Checkpointer(tmp_path, model=nn.Linear(2, 2)).save(step_number)


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ShardfitError, match="could not be saved"):
        Checkpointer(tmp_path / "runs", model=nn.Linear(2, 2)).save(1)
