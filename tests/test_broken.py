"""A proof that can't fail proves nothing: each fault is told apart and named, and the right one is clean."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from faults import FAULTS, ORIGINAL, RESUME_FAULTS, RIGHT, broken
from record import record
from shardfit.parity.causes import name_causes, name_resume_causes
from shardfit.parity.compare import compare

STEPS = 8


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return record(tmp_path_factory.mktemp("original"), ORIGINAL, steps=STEPS)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    recording = record(folder, RIGHT, ranks=2, steps=STEPS)
    return folder, recording


def codes(findings):
    return [finding.code for finding in findings]


def test_the_right_one_is_clean(original, right):
    comparison = compare(original, right[1])
    assert name_causes(original, right[1], comparison) == ()
    assert comparison.agrees, comparison
    assert comparison.num_steps == STEPS
    assert len(comparison.weights) == 16
    assert max(weight.absolute for weight in comparison.weights) < 1e-5


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tmp_path, original, name):
    candidate = record(tmp_path, broken(name), ranks=2, steps=STEPS)
    comparison = compare(original, candidate)
    findings = name_causes(original, candidate, comparison)
    assert codes(findings) == [FAULTS[name][0]], [str(finding) for finding in findings]
    assert all(finding.evidence and finding.fix for finding in findings)
    if name not in ("batch-not-sliced", "forward-called"):
        assert not comparison.agrees, "the numbers show it too"


def resume(folder, right, source, ranks):
    """The candidate started again from what the right one saved at step 4."""
    shutil.copytree(right[0] / "saved", folder / "saved")
    recording = record(folder, source, ranks=ranks, steps=STEPS - 4, argv=("--resume",))
    moved = tuple(dataclasses.replace(rank, first_step=4) for rank in recording.ranks)
    return dataclasses.replace(recording, ranks=moved)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_right_one_resumes(tmp_path, original, right, ranks):
    resumed = resume(tmp_path, right, RIGHT, ranks)
    comparison = compare(original, resumed)
    assert name_resume_causes(original, right[1], resumed, comparison) == ()
    assert comparison.agrees, comparison
    assert (comparison.first, comparison.num_steps) == (4, 4)


@pytest.mark.parametrize("name", RESUME_FAULTS)
def test_a_fault_of_resuming_is_named(tmp_path, original, right, name):
    resumed = resume(tmp_path, right, broken(name), 2)
    comparison = compare(original, resumed)
    assert not comparison.agrees
    findings = name_resume_causes(original, right[1], resumed, comparison)
    assert codes(findings) == [RESUME_FAULTS[name][0]], [str(finding) for finding in findings]
