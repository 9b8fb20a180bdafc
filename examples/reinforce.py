"""REINFORCE by hand, from the platform's low-level calls: environment, predict, train_batch.

    vla up && export VLA_URL=$(vla tenants add me)    # then fine-tune a policy: see README.md
    python examples/reinforce.py --init-from reach/sft-.../200 --updates 20

The platform never sees this algorithm: sessions, predictions and updates are calls, everything in
between is numpy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from vla_platform.client import Observation, Platform, Prediction
from vla_platform.datasets.prompts import encode_prompts
from vla_platform.envs.sessions import Outcome

Columns = dict[str, Any]
GAMMA = 0.99


def play(
    platform: Platform,
    *,
    policy: str,
    version: int | str | None,
    seeds: list[int],
    decisions: int,
    options: dict[str, Any],
) -> list[list[tuple[Observation, Prediction, int, Outcome]]]:
    """One episode per seed: what was seen, predicted (and in which row), and what came of it."""
    episodes: list[list[tuple[Observation, Prediction, int, Outcome]]] = [[] for _ in seeds]
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(platform.environment("tabletop/reach", options=options))
            for _ in seeds
        ]
        seen = [one.reset(seed=seed) for one, seed in zip(sessions, seeds, strict=True)]
        running = list(range(len(seeds)))
        for decision in range(decisions):
            found = platform.predict(
                [seen[at] for at in running],
                policy=policy,
                version=version,
                sample=True,
                return_log_probs=True,
                seed=1000 * seeds[0] + decision,
            )
            for row, at in enumerate(list(running)):
                outcome = sessions[at].step(found.actions[row])
                episodes[at].append((seen[at], found, row, outcome))
                seen[at] = outcome.observation
                if outcome.done:
                    running.remove(at)
            if not running:
                break
    return episodes


def columns_of(
    episodes: list[list[tuple[Observation, Prediction, int, Outcome]]],
    *,
    cameras: tuple[str, ...],
    image_size: int,
) -> Columns:
    """The rows of an update: one per decision, and one for what each episode saw last."""
    from vla_platform.datasets.frames import resize

    rows: list[dict[str, Any]] = []
    for number, episode in enumerate(episodes):
        _, first, row, _ = episode[0]
        assert first.latents is not None and first.log_probs is not None
        latent, log_prob = first.latents[row], first.log_probs[row]
        chunk = len(log_prob)
        for seen, found, at, outcome in [*episode, (episode[-1][3].observation, None, 0, None)]:
            frames = [resize(seen.images[name], image_size) for name in cameras]
            done = outcome.num_steps if outcome is not None else 0
            rewards = np.zeros(chunk, np.float32)
            if outcome is not None:
                rewards[:done] = outcome.rewards
            rows.append(
                {
                    "images": np.stack(frames),
                    "state": seen.state,
                    "task": seen.task,
                    "latent": found.latents[at] if found is not None else np.zeros_like(latent),
                    "log_prob": found.log_probs[at] if found is not None else 0 * log_prob,
                    "rewards": rewards,
                    "actions_is_pad": np.arange(chunk) >= done,
                    "is_transition": outcome is not None,
                    "terminated": outcome is not None and outcome.terminated,
                    "next_row": len(rows) + 1 if outcome is not None else -1,
                    "episode": number,
                }
            )
    columns = {
        name: np.stack([np.asarray(row[name]) for row in rows])
        for name in rows[0]
        if name != "task"
    }
    return {**columns, "prompt": encode_prompts([row["task"] for row in rows])}


def advantages(columns: Columns) -> Columns:
    """Discounted returns less their mean, scaled: the REINFORCE of a text book."""
    given = columns["rewards"].astype(np.float64)
    rewards = np.where(columns["actions_is_pad"], 0.0, given).sum(axis=1)
    returns = np.zeros(len(rewards))
    decisions = np.flatnonzero(columns["is_transition"])
    for row in decisions[::-1]:
        after = 0.0 if columns["terminated"][row] else returns[columns["next_row"][row]]
        returns[row] = rewards[row] + GAMMA * after
    centred = returns - returns[decisions].mean()
    trained = ~columns["actions_is_pad"] & columns["is_transition"][:, None]
    each = np.where(trained, centred[:, None], 0.0)
    chosen = each[trained]
    each = np.where(trained, (each - chosen.mean()) / (chosen.std() + 1e-5), 0.0)
    return {"advantages": each.astype(np.float32), "trained": trained}


def spec(policy: str, init_from: str, updates: int) -> dict[str, Any]:
    return {
        "kind": "rl",
        "policy": policy,
        "init_from": init_from,
        "environment": None,
        "algorithm": {"kind": "reinforce", "gamma": GAMMA},
        "optimizer": {"lr": 3e-5},
        "updates": updates,
    }


def train(platform: Platform, init_from: str, *, updates: int) -> Iterator[dict[str, Any]]:
    """The algorithm: act, judge, train; the update's event each time."""
    run = platform.submit(spec("by-hand", init_from, updates))
    image_size = run.schema().image_size
    version: int | str = init_from
    acting = init_from.partition("/")[0]
    for update in range(updates):
        episodes = play(
            platform,
            policy=acting,
            version=version,
            seeds=[8 * update + at for at in range(8)],
            decisions=6,
            options={"max_steps": 24, "reward": "dense"},
        )
        columns = columns_of(episodes, cameras=("top", "wrist"), image_size=image_size)
        found = run.train_batch({**columns, **advantages(columns)})
        version, acting = int(found["policy_version"]), "by-hand"
        scores = [sum(float(step[3].rewards.sum()) for step in one) for one in episodes]
        yield {**found, "mean_return": float(np.mean(scores))}
    print(run.result(60).checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--init-from", required=True, help="id of a fine-tuned checkpoint")
    parser.add_argument("--updates", type=int, default=20)
    arguments = parser.parse_args()
    with Platform(os.environ["VLA_URL"]) as platform:
        for found in train(platform, arguments.init_from, updates=arguments.updates):
            print(f"update {found['step']}: return {found['mean_return']:.3f}")


if __name__ == "__main__":
    main()
