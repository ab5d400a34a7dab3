"""Retention, without a disk."""

from __future__ import annotations

import itertools

import pytest

from shardfit import ShardfitError
from shardfit.checkpoint.layout import Slot
from shardfit.checkpoint.retain import choose_expired


def slots(*steps):
    return [Slot(0, step) for step in steps]


def test_the_newest_stay():
    assert choose_expired(slots(10, 20, 30, 40), keep=2) == slots(10, 20)


def test_newest_is_by_number_whatever_the_order_given():
    for order in itertools.permutations(slots(9, 10, 99, 100)):
        assert choose_expired(order, keep=2) == slots(9, 10)


def test_none_keeps_all():
    assert choose_expired(slots(10, 20, 30)) == []
    assert choose_expired(slots(10, 20, 30), keep_every=20) == []


def test_fewer_than_are_kept():
    assert choose_expired([], keep=3) == []
    assert choose_expired(slots(10, 20), keep=3) == []


def test_every_so_many_steps_one_stays():
    assert choose_expired(slots(50, 100, 150, 200, 250), keep=1, keep_every=100) == slots(50, 150)


def test_a_later_generation_is_newer_than_a_later_step():
    committed = [*slots(100, 200, 300), Slot(1, 150)]
    assert choose_expired(committed, keep=2) == slots(100, 200)


def test_a_step_saved_again_replaces_the_first():
    committed = [*slots(100, 200), Slot(1, 200), Slot(2, 200)]
    assert choose_expired(committed) == [Slot(0, 200), Slot(1, 200)]
    assert choose_expired(committed, keep=2) == [Slot(0, 200), Slot(1, 200)]
    assert choose_expired(committed, keep=1) == [Slot(0, 100), Slot(0, 200), Slot(1, 200)]


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("keep", [None, 1, 2, 3])
@pytest.mark.parametrize("keep_every", [None, 1, 4])
def test_the_newest_never_goes(number, keep, keep_every):
    for steps in itertools.combinations(range(8), number):
        committed = slots(*steps)
        expired = choose_expired(committed, keep=keep, keep_every=keep_every)
        assert max(committed) not in expired
        assert len(committed) - len(expired) >= min(keep or number, number)


@pytest.mark.parametrize(
    "policy", [{"keep": 0}, {"keep": -1}, {"keep": True}, {"keep": 1.5}, {"keep_every": 0}]
)
def test_a_policy_that_keeps_nothing_is_refused(policy):
    with pytest.raises(ShardfitError, match="at least 1"):
        choose_expired(slots(1), **policy)
