"""Manifest, layout and verification: no torch, no process group."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys

import pytest

from shardfit import Manifest, ShardfitError
from shardfit.checkpoint.claim import Claim
from shardfit.checkpoint.layout import (
    Slot,
    list_committed,
    list_named,
    list_unfinished,
    next_slot,
    parse_slot,
    remove,
)
from shardfit.checkpoint.manifest import SavedTensor, measure_file
from shardfit.checkpoint.verify import verify


def make(folder, step=7):
    """A committed checkpoint of two files; its manifest."""
    folder.mkdir(parents=True)
    for name, content in (("__0_0.distcp", bytes(range(256)) * 9), ("state.json", b"{}")):
        (folder / name).write_bytes(content)
    manifest = Manifest(
        step=step,
        world=2,
        data_world=2,
        mesh={"shard": 2},
        plan_digest="ab" * 32,
        torch_version="2.13.0",
        shardfit_version="0.1.0",
        parts=("model", "optimizer"),
        tensors=(SavedTensor("model.a", (2, 3), "float32"), SavedTensor("model.b", (), "int64")),
        aliases={"model.c": "model.a"},
        files=tuple(measure_file(folder / name) for name in ("__0_0.distcp", "state.json")),
    )
    manifest.write(folder)
    return manifest


def test_written_and_read(tmp_path):
    manifest = make(tmp_path / "step-00000007")
    assert Manifest.read(tmp_path / "step-00000007") == manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.size_bytes == 256 * 9 + 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.step = 8


def test_needs_no_torch(tmp_path):
    make(tmp_path / "step-00000007")
    program = f"""
import sys
import shardfit.checkpoint.claim, shardfit.checkpoint.retain, shardfit.checkpoint.values
from shardfit import Manifest
from shardfit.checkpoint.verify import verify
assert Manifest.read({str(tmp_path / "step-00000007")!r}).step == 7
assert verify({str(tmp_path / "step-00000007")!r}).exit_status == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_changed_byte_of_the_manifest_is_noticed(tmp_path):
    folder = tmp_path / "step-00000007"
    make(folder)
    file = folder / "manifest.json"
    good = file.read_bytes()
    for place in range(0, len(good), 3):
        for change in (0x01, 0x20):
            file.write_bytes(good[:place] + bytes([good[place] ^ change]) + good[place + 1 :])
            with pytest.raises(ShardfitError):
                Manifest.read(folder)
    for length in range(0, len(good) - 1, 37):
        file.write_bytes(good[:length])
        with pytest.raises(ShardfitError):
            Manifest.read(folder)


def test_of_another_version(tmp_path):
    folder = tmp_path / "step-00000007"
    make(folder)
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**raw, "version": 99}))
    with pytest.raises(ShardfitError, match=r"another version(.|\n)*99"):
        Manifest.read(folder)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ShardfitError, match="is not there"):
        Manifest.read(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardfitError, match=r"SF732(.|\n)*written last"):
        Manifest.read(tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").write_text('{"short_name": "app"}')
    with pytest.raises(ShardfitError, match="not the manifest of a shardfit checkpoint"):
        Manifest.read(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ShardfitError, match="is a file"):
        Manifest.read(tmp_path / "file")


def test_verify_names_every_damaged_file(tmp_path):
    folder = tmp_path / "step-00000007"
    make(folder)
    assert verify(folder).findings == ()
    shard, state = folder / "__0_0.distcp", folder / "state.json"
    good = shard.read_bytes()
    flip = random.Random(0)
    for _ in range(20):
        place = flip.randrange(len(good))
        shard.write_bytes(good[:place] + bytes([good[place] ^ (1 << flip.randrange(8))]) + good[place + 1 :])
        (finding,) = verify(folder).findings
        assert finding.code == "SF720"
        assert "__0_0.distcp: its content has changed" in finding.evidence
    shard.write_bytes(good[:100])
    state.unlink()
    report = verify(folder)
    assert report.exit_status == 1
    assert [f.evidence for f in report.findings] == [
        "__0_0.distcp: 100 bytes, saved with 2,304",
        "state.json: missing",
    ]


def test_verify_of_what_is_no_checkpoint(tmp_path):
    assert verify(tmp_path).exit_status == 1  # unfinished
    assert verify(tmp_path / "missing").exit_status == 3


def test_names():
    for slot in (Slot(0, 0), Slot(0, 100), Slot(3, 123456789012)):
        assert parse_slot(slot.name) == slot
    for name in ("step-100", "step-00000100.0", "step-00000100.x", "step-", ".step-00000100.saving-ab", "x"):
        assert parse_slot(name) is None


def test_order_is_by_number(tmp_path):
    for step in (9, 10, 99_999_999, 100_000_000, 1_000_000_000):
        make(tmp_path / Slot(0, step).name, step)
    assert [slot.step for slot in list_committed(tmp_path)] == [
        9,
        10,
        99_999_999,
        100_000_000,
        1_000_000_000,
    ]


def test_what_counts_as_committed(tmp_path):
    make(tmp_path / "step-00000010")
    make(tmp_path / ".step-00000020.saving-abc123")
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / ".step-00000005.deleting-abc123").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000040").write_text("a file")
    assert list_committed(tmp_path) == [Slot(0, 10)]
    assert list_unfinished(tmp_path) == [".step-00000005.deleting-abc123", ".step-00000020.saving-abc123"]
    assert next_slot(list_named(tmp_path), 30) == Slot(1, 30)
    assert list_committed(tmp_path / "missing") == []


def test_next_slot_is_greater_than_all():
    assert next_slot([], 0) == Slot(0, 0)
    assert next_slot([Slot(0, 5)], 6) == Slot(0, 6)
    assert next_slot([Slot(0, 5)], 5) == Slot(1, 5)
    assert next_slot([Slot(0, 5), Slot(1, 2)], 3) == Slot(1, 3)
    assert next_slot([Slot(0, 99_999_999)], 100_000_000) == Slot(0, 100_000_000)


def test_a_deletion_cut_short_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    make(tmp_path / "step-00000010")

    def die(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path, Slot(0, 10))
    assert list_committed(tmp_path) == []
    assert len(list_unfinished(tmp_path)) == 1


def commit_by(claim, step):
    slot, name = claim.begin(step)
    shutil.rmtree(claim.folder / name)
    make(claim.folder / slot.name, step)
    claim.settle(slot, keep=2, keep_every=None)
    return slot


def test_a_claim_refuses_what_another_run_put_there(tmp_path):
    claim = Claim(tmp_path)
    make(tmp_path / "step-00000010")
    claim.find(None)
    commit_by(claim, 20)
    make(tmp_path / "step-00000015")
    for act in (lambda: claim.begin(30), lambda: claim.find(None)):
        with pytest.raises(ShardfitError, match=r"another run(.|\n)*step-00000015"):
            act()
    shutil.rmtree(tmp_path / "step-00000015")
    make(tmp_path / ".step-00000030.saving-0123456789ab0001")
    with pytest.raises(ShardfitError, match="another run"):
        claim.begin(30)


def test_two_runs_that_start_at_once_notice_each_other(tmp_path):
    first, second = Claim(tmp_path), Claim(tmp_path)
    assert first.find(None) is None
    assert second.find(None) is None
    first.begin(10)
    with pytest.raises(ShardfitError, match="another run"):
        second.begin(10)


def test_a_run_that_did_not_resume_saves_nothing_older(tmp_path):
    make(tmp_path / "step-00000300")
    for step in (1, 300):
        with pytest.raises(ShardfitError, match=r"step 300(.|\n)*resume\(\)"):
            Claim(tmp_path).begin(step)
    assert list_named(tmp_path) == [Slot(0, 300)]
    assert list_unfinished(tmp_path) == []
    assert Claim(tmp_path).begin(301)[0] == Slot(0, 301)


def test_leftovers_are_deleted_after_a_save_only(tmp_path):
    for name in (".step-00000020.saving-0123456789ab0001", ".step-00000005.deleting-abc123"):
        make(tmp_path / name)
    claim = Claim(tmp_path)
    claim.find(None)
    slot, name = claim.begin(30)
    assert len(list_unfinished(tmp_path)) == 3
    make(tmp_path / slot.name, 30)
    claim.settle(slot, keep=None, keep_every=None)
    assert list_unfinished(tmp_path) == []


def test_a_folder_of_one_checkpoint_is_not_the_folder_of_checkpoints(tmp_path):
    make(tmp_path / "step-00000010")
    with pytest.raises(ShardfitError, match="folder of one checkpoint"):
        Claim(tmp_path / "step-00000010").find(None)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    with pytest.raises(ShardfitError, match="folder of one checkpoint"):
        Claim(tmp_path / "dcp").begin(1)


def test_a_checkpoint_without_its_manifest_is_passed_over_aloud(tmp_path):
    make(tmp_path / "step-00000010")
    (tmp_path / "step-00000020").mkdir()
    with pytest.warns(UserWarning, match="step-00000020 has no manifest"):
        assert Claim(tmp_path).find(None) == Slot(0, 10)
    with pytest.raises(ShardfitError, match="no committed checkpoint of step 20"):
        Claim(tmp_path).find(20)
