"""Evaluation suites: by name, a fixed list of environments, seeds and initial states.

Any environment id is a suite of its own (`tabletop/push`, `maniskill/PushCube-v1`);
`libero/<suite>` has all tasks of a LIBERO suite with their recorded initial states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vla_platform.envs.catalog import LIBERO_INIT_STATES, LIBERO_SUITES
from vla_platform.envs.harnesses import check_request
from vla_platform.envs.seeds import Use, derive_seed
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import SpecError
from vla_platform.specs import canonical_json

MAX_EPISODES = 100_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One episode of an evaluation."""

    index: int  # in the evaluation, from 0
    env_id: str
    seed: int
    init_state: int | None = None  # of the recorded ones, where the environment has them

    @property
    def reset_options(self) -> Mapping[str, Any] | None:
        return None if self.init_state is None else {"init_state": self.init_state}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`episodes` different starts, in the order in which they are numbered."""

    name: str
    seed: int
    cases: tuple[Case, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # for every environment

    @property
    def digest(self) -> str:
        """Equal for equal evaluations; an interrupted one goes on only under the same."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()


def suite(
    name: str, *, episodes: int, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Suite:
    """Exactly `episodes` cases, none of them twice: by episode number, never by session (PF-34).

    Tasks take turns, then their initial states. Raises `SpecError` for an unknown name, or where
    there are not so many different starts.
    """
    if type(episodes) is not int or not 1 <= episodes <= MAX_EPISODES:
        raise _refused("episodes", f"use 1 to {MAX_EPISODES}", episodes)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise _refused("seed", "use 0 to 2**32 - 1", seed)
    envs, num_init_states = _environments(name)
    for env_id in envs:
        check_request(EnvironmentRequest(env_id=env_id, options=options or {}))
    if num_init_states and episodes > len(envs) * num_init_states:
        raise _refused(
            "episodes",
            f"{name} has {len(envs) * num_init_states} recorded starts, and none is used twice",
            episodes,
        )
    cases = []
    for index in range(episodes):
        start, task = divmod(index, len(envs))
        cases.append(
            Case(
                index=index,
                env_id=envs[task],
                seed=derive_seed(Use.EVALUATION, seed, index),
                init_state=start if num_init_states else None,
            )
        )
    return Suite(name=name, seed=seed, cases=tuple(cases), options=options or {})


def _environments(name: str) -> tuple[tuple[str, ...], int]:
    """Environments of a suite and how many recorded initial states each has."""
    harness, _, rest = name.partition("/")
    if harness == "libero" and rest in LIBERO_SUITES:
        tasks = tuple(f"libero/{rest}/{task}" for task in range(LIBERO_SUITES[rest]))
        return tasks, LIBERO_INIT_STATES
    return (name,), LIBERO_INIT_STATES if harness == "libero" else 0


def _refused(field_name: str, problem: str, value: object) -> SpecError:
    shown = repr(value)[:80]
    return SpecError(
        f"{field_name}: {problem}, got {shown}",
        problems=[{"field": field_name, "value": shown, "problem": problem, "hint": ""}],
    )
