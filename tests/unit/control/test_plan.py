"""The plan places every optimizer step once, in order, with held-out losses around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.control.plan import Domain, Plan
from vla_platform.specs import parse_spec


@given(steps=st.integers(1, 60), batch=st.integers(1, 9), every=st.none() | st.integers(1, 60))
def test_every_step_once_in_order(steps: int, batch: int, every: int | None):
    plan = Plan(steps=steps, batch_size=batch, evaluate_every=every and min(every, steps))
    places = [plan.place(position) for position in range(plan.positions)]
    train = [place for place in places if place.domain is Domain.TRAIN]
    assert list(range(1, steps + 1)) == [place.step for place in train]
    assert [(step - 1) * batch for step in range(1, steps + 1)] == [p.first_sample for p in train]
    assert sorted(place.step for place in places) == [place.step for place in places]
    if every is not None:
        heldout = [place.step for place in places if place.domain is Domain.HELDOUT]
        assert (0, steps) == (heldout[0], heldout[-1])
        assert len(heldout) == len(set(heldout))


def test_epochs_become_steps():
    spec = parse_spec(
        {"policy": "p", "dataset": {"path": "d"}, "epochs": 3, "batch_size": 8, "kind": "sft"}
    )
    plan = Plan.of(spec, num_samples=100, num_heldout=0)
    assert (plan.steps, plan.positions) == (38, 38)


def test_positions_end():
    plan = Plan(steps=2, batch_size=1, evaluate_every=2)
    assert plan.positions == 4
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            plan.place(outside)
