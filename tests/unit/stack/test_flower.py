"""F75: Flower's memory is bounded however many tasks pass, and it never sees what tenants sent."""

from __future__ import annotations

import pytest

from vla_platform.broker import MAX_SHOWN
from vla_platform.stack.roles import CLUSTER_LIKE, MOST_FLOWER_TASKS, ROLES

pytest.importorskip("flower")


def test_f75_what_flower_keeps_is_bounded_however_many_tasks_pass() -> None:
    from flower.events import EventsState

    most = 500
    state = EventsState(max_tasks_in_memory=most)
    for number in range(10 * most):
        event = {
            "type": "task-received", "uuid": str(number), "name": "training.train_job",
            "args": "()", "kwargs": "x" * MAX_SHOWN, "hostname": "gpu@h",
            "timestamp": 1.0 * number, "local_received": 1.0 * number, "clock": number,
            "utcoffset": 0, "pid": 1,
        }  # fmt: skip
        state.event(event)
    assert most == len(state.tasks)
    assert len(state._taskheap) <= 4 * most  # the order in which they came


@pytest.mark.parametrize("roles", [ROLES, CLUSTER_LIKE])
def test_f75_the_stack_starts_it_so(roles) -> None:
    (flower,) = (role for role in roles if role.name == "flower")
    assert f"--max-tasks={MOST_FLOWER_TASKS}" in flower.command({"VLA_PORT": "1"})
