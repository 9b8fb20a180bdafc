"""Where sessions run: how many children are shared, and which of them must go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from vla_platform.envs.processes import ChildProcess, ProcessRunner
from vla_platform.envs.runner_pool import Isolation, RunnerPool
from vla_platform.envs.runners import Runner


class Pool:
    def __init__(self, *, memory_bytes: int) -> None:
        self.in_use: list[Runner] = []
        self.pool = RunnerPool(
            processes=2, memory_bytes=memory_bytes, in_use=lambda: list(self.in_use)
        )

    def new(self, isolation: Isolation) -> ChildProcess:
        runner = self.pool.new(isolation)
        assert isinstance(runner, ProcessRunner)
        self.in_use.append(runner)
        return runner.child


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    made: list[Pool] = []
    yield made
    for one in made:
        one.pool.kill()
        for runner in one.in_use:
            runner.abandon()


def test_shared_children_are_filled_evenly_and_a_worn_one_goes_with_its_last_session(
    pools: list[Pool],
) -> None:
    pools.append(one := Pool(memory_bytes=8 << 30))
    children = [one.new(Isolation.SHARED) for _ in range(4)]
    assert [children.count(child) for child in set(children)] == [2, 2]
    worn, sound = children[0], next(child for child in children if child is not children[0])
    worn.worn = True
    assert one.new(Isolation.SHARED) not in (worn, sound)  # a new one in its place
    one.pool.tidy()
    assert worn.alive  # sessions are still in it
    one.in_use = [r for r in one.in_use if isinstance(r, ProcessRunner) and r.child is not worn]
    one.pool.tidy()
    assert not worn.alive
    assert sound.alive


@pytest.mark.parametrize("isolation", [Isolation.SHARED, Isolation.PROCESS])
def test_a_process_far_over_its_limit_is_ended(pools: list[Pool], isolation: Isolation) -> None:
    pools.append(one := Pool(memory_bytes=1))
    child = one.new(isolation)
    wait_until(lambda: child.memory_bytes > 0)
    one.pool.tidy()
    assert not child.alive
