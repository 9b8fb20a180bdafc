"""What an environment host costs beside the simulator, and how it uses the cores.

    python benchmarks/environments.py [--quick]

Real ManiSkill (PushCube, state observations) with 1, 4 and 16 sessions of one host, on threads and
in two shared child processes, against a bare loop over the same simulator in one process and
gymnasium's AsyncVectorEnv (one process each). All contenders of a size are open at once and take
turns; medians over the rounds. `session_overhead_ms` is a host's step with one session less the
same adapter's step called directly, the median of the differences of neighbouring blocks. Between
two steps the caller is away for a moment, as it is while a policy answers; the details have the
difference without that, where the direct call keeps its caches warm as no policy's simulator does.
`vs_best_peer_16` is the shared host's steps a second as a share of the better peer's. Runs in
ManiSkill's own Python environment, which it makes where missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from result_line import print_result, target

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 4, 16)
TASK = "PushCube-v1"
MAX_STEPS = 1_000_000
ACTION_DIM = 8
OVERHEAD_GOAL_MS = 0.3
ANSWER_S = 0.002  # of a quick policy
PEER_GOAL = 0.9

Advance = Callable[[], None]


def make_plain() -> Any:
    """The environment as a user of the package makes it."""
    import gymnasium
    import mani_skill.envs  # noqa: F401
    import torch
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    return CPUGymWrapper(
        gymnasium.make(
            TASK, num_envs=1, obs_mode="state", sim_backend="physx_cpu", render_backend="cpu",
            max_episode_steps=MAX_STEPS,
        )
    )  # fmt: skip


@contextlib.contextmanager
def in_turn(envs: list[Any]) -> Iterator[Advance]:
    """One step of each, one after the other."""
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    action = np.zeros(ACTION_DIM, np.float32)

    def advance() -> None:
        for env in envs:
            env.step(action)

    yield advance
    for env in envs:
        env.close()


def bare(num: int) -> contextlib.AbstractContextManager[Advance]:
    return in_turn([make_plain() for _ in range(num)])


def adapter(num: int) -> contextlib.AbstractContextManager[Advance]:
    """The harness's own environment, without session and host."""
    from vla_platform.envs.harnesses import make_environment
    from vla_platform.envs.sessions import EnvironmentRequest

    request = EnvironmentRequest(env_id=f"maniskill/{TASK}", options=options())
    return in_turn([make_environment(request) for _ in range(num)])


@contextlib.contextmanager
def hosted(num: int, isolation: str) -> Iterator[Advance]:
    from vla_platform.envs.host import EnvironmentHost, HostLimits
    from vla_platform.envs.runner_pool import Isolation
    from vla_platform.envs.sessions import EnvironmentRequest

    host = EnvironmentHost(HostLimits(lease_s=3600.0, processes=min(num, os.cpu_count() or 1)))
    request = EnvironmentRequest(env_id=f"maniskill/{TASK}", options=options())
    opening = [
        host.call(host.open("a", request, isolation=Isolation(isolation))) for _ in range(num)
    ]
    names = [future.result()[0] for future in opening]
    resets = [(name, seed, None) for seed, name in enumerate(names)]
    host.call(host.batch_reset("a", resets)).result()
    chunk = np.zeros((1, ACTION_DIM), np.float32)

    def advance() -> None:
        outcomes = host.step_now("a", [(name, chunk) for name in names])  # as rollouts do
        assert all(not isinstance(outcome, Exception) for outcome in outcomes), outcomes

    yield advance
    host.shut_down()


@contextlib.contextmanager
def asynchronous(num: int) -> Iterator[Advance]:
    import gymnasium

    envs = gymnasium.vector.AsyncVectorEnv([make_plain] * num, context="forkserver")
    envs.reset(seed=0)
    actions = np.zeros((num, ACTION_DIM), np.float32)

    def advance() -> None:
        envs.step(actions)

    yield advance
    envs.close()


def options() -> dict[str, Any]:
    return {"observations": "state", "max_steps": 10_000}


def measure(num: int, *, rounds: int, steps: int) -> dict[str, float]:
    """Steps a second of every contender, medians over alternating rounds."""
    with contextlib.ExitStack() as stack:
        contenders = {
            "bare": stack.enter_context(bare(num)),
            "adapter": stack.enter_context(adapter(num)),
            "host_thread": stack.enter_context(hosted(num, "thread")),
            "host_shared": stack.enter_context(hosted(num, "shared")),
            "async_vector": stack.enter_context(asynchronous(num)),
        }
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for advance in contenders.values():
            for _ in range(3):
                advance()
        for number in range(rounds):
            for name, advance in contenders.items():
                started = time.perf_counter()
                for _ in range(steps):
                    advance()
                found[name].append(num * steps / (time.perf_counter() - started))
            print(f"{num} sessions, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {name: statistics.median(rates) for name, rates in found.items()}


def overhead(*, rounds: int, steps: int, pause_s: float) -> float:
    """Milliseconds that a session of a host adds to a step, `pause_s` after the step before."""
    with adapter(1) as direct, hosted(1, "thread") as session:
        differences = []
        for _ in range(rounds):
            took = [0.0, 0.0]
            for at, advance in enumerate((direct, session)):
                for _ in range(steps):
                    if pause_s:
                        time.sleep(pause_s)
                    began = time.perf_counter()
                    advance()
                    took[at] += time.perf_counter() - began
            differences.append(1000 * (took[1] - took[0]) / steps)
    return statistics.median(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    if importlib.util.find_spec("mani_skill") is None:
        from vla_platform.envs.installs import install

        python = install("maniskill", ROOT / "var", say=lambda line: print(line, file=sys.stderr))
        # The same file again, in the interpreter that has the simulator.
        sys.exit(subprocess.run((str(python), *sys.argv), check=False).returncode)
    rounds, budget = (5, 320) if quick else (11, 960)
    rates = {str(num): measure(num, rounds=rounds, steps=max(10, budget // num)) for num in SIZES}
    added_ms, hot_ms = (
        overhead(rounds=10 * rounds, steps=20, pause_s=pause_s) for pause_s in (ANSWER_S, 0.0)
    )
    most = rates["16"]
    best_peer = max(most["bare"], most["async_vector"])
    targets = {
        "vs_best_peer_16": target(most["host_shared"] / best_peer, PEER_GOAL, "ratio"),
        "session_overhead_ms": target(added_ms, OVERHEAD_GOAL_MS, "ms"),
    }
    shown = {num: {name: round(rate, 1) for name, rate in by.items()} for num, by in rates.items()}
    print_result(
        "environments",
        targets,
        {"steps_per_s": shown, "overhead_in_a_hot_loop_ms": hot_ms, "task": TASK},
    )


if __name__ == "__main__":
    main()
