"""Rollouts: whole episodes as rows, published once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_platform.envs.base import Observation
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.policies import ExpertPolicy, Predicted
from vla_platform.envs.rollout import rollout
from vla_platform.envs.rollout_messages import RolloutConfig, RolloutReport
from vla_platform.errors import DataError, LeaseLostError, SimulatorError
from vla_storage.errors import StorageUnavailableError
from vla_storage.payloads import MemoryPayloadStore

MakeHost = Callable[..., EnvironmentHost]
CHUNK = 4


class CountingPolicy:
    """Chunks whose every action names the prediction it came from; values name the observation."""

    def __init__(self, *, version: int = 3, bad_at: int | None = None) -> None:
        self.version = version
        self.bad_at = bad_at
        self.num_predictions = 0

    def predict(
        self, observations: Sequence[Observation], *, policy_key: str, version: int | None,
        seed: int | None = None, timeout_s: float,
    ) -> Predicted:  # fmt: skip
        actions = np.full((len(observations), CHUNK, 1), self.num_predictions / 1000, np.float32)
        if self.num_predictions == self.bad_at:
            actions[0, 0] = np.nan
        self.num_predictions += 1
        steps = np.array([seen.state[2] for seen in observations], np.float32)
        log_prob = np.tile(steps[:, None], (1, CHUNK))
        return Predicted(actions, self.version, "digest", log_prob=log_prob, value=100 + steps)


def config(**changes: Any) -> RolloutConfig:
    values: dict[str, Any] = {
        "tenant": "a", "policy_key": "a/p", "partition_id": "p1", "env_id": "faulty/one",
        "cameras": ("main",), "image_size": 16, "chunk": CHUNK,
    }  # fmt: skip
    return RolloutConfig(**{**values, **changes})


def play(
    host: EnvironmentHost, asked: RolloutConfig, *, num_envs: int = 3, horizon: int = 6,
    policy: Any = None, version: int | None = 3, **more: Any,
) -> tuple[RolloutReport, dict[str, Any]]:  # fmt: skip
    payloads = more.pop("payloads", None) or MemoryPayloadStore()
    report = rollout(
        asked, "j1", num_envs, horizon, version, host=host, policy=policy or CountingPolicy(),
        payloads=payloads, **more,
    )  # fmt: skip
    return report, payloads.get("p1", "a")


def test_pf33_every_decision_leads_to_the_true_next_observation(make_host: MakeHost) -> None:
    report, rows = play(make_host(), config(env_options={"length": 6}))
    # Chunks of 4 in episodes of 6: steps 0-4, then 4-6, then the next episode.
    assert 18 == report.num_transitions == rows["is_transition"].sum()
    for row in np.flatnonzero(rows["is_transition"]):
        following = rows["next_row"][row]
        executed = int((~rows["actions_is_pad"][row]).sum())
        assert rows["state"][following, 2] == rows["state"][row, 2] + executed
        assert rows["images"][following, 0, 5, 5, 0] == rows["state"][following, 2]
        assert rows["episode"][following] == rows["episode"][row]
    finals = ~rows["is_transition"]
    assert {6.0} == set(rows["state"][finals, 2].tolist())
    assert (rows["next_row"][finals] == -1).all()
    assert len(np.unique(rows["frame"][rows["episode"] == 0])) == 3


def test_every_transition_appears_once_and_in_order(make_host: MakeHost) -> None:
    report, rows = play(make_host(), config(env_options={"length": 6}), num_envs=4, horizon=9)
    assert report.num_transitions == 36
    assert list(range(len(report.episodes))) == [one.episode for one in report.episodes]
    for name in ("images", "state", "actions", "rewards", "policy_version", "log_prob", "value"):
        assert report.num_rows == len(rows[name])
    assert report.num_env_steps == (~rows["actions_is_pad"]).sum()
    # 9 decisions a session: four whole episodes of two, and one that the horizon cuts.
    assert sum(one.end == "horizon" for one in report.episodes) == 4
    assert sum(one.end == "truncated" and one.success for one in report.episodes) == 16
    assert report.success_rate == 1.0


def test_pf35_no_action_of_an_episode_is_played_in_the_next(make_host: MakeHost) -> None:
    _, rows = play(make_host(), config(env_options={"length": 6}), num_envs=1)
    moves = rows["executed_actions"][rows["is_transition"]]
    used = ~rows["actions_is_pad"][rows["is_transition"]]
    for decision, (chunk, mask) in enumerate(zip(moves, used, strict=True)):
        np.testing.assert_allclose(chunk[mask, 0], decision / 1000)
    assert used.sum(axis=1).tolist() == [4, 2, 4, 2, 4, 2]


def test_execute_steps_predicts_again_before_the_chunk_is_over(make_host: MakeHost) -> None:
    report, rows = play(make_host(), config(execute_steps=2, env_options={"length": 100}))
    assert report.num_env_steps == 3 * 6 * 2
    assert (rows["actions_is_pad"][rows["is_transition"]] == [False, False, True, True]).all()


def test_truncated_and_cut_episodes_have_the_value_of_their_end(make_host: MakeHost) -> None:
    _, rows = play(make_host(), config(env_options={"length": 6}), horizon=3)
    finals = ~rows["is_transition"]
    # The value policy answers 100 + the step of the observation it is asked for.
    np.testing.assert_array_equal(100 + rows["state"][:, 2], rows["value"])
    assert {106.0, 104.0} == set(rows["value"][finals].tolist())


def test_terminated_episodes_end_with_value_zero(make_host: MakeHost) -> None:
    options = {"fault": "both_ends", "at": 2, "length": 50}
    _, rows = play(make_host(), config(env_options=options), horizon=2)
    finals = ~rows["is_transition"]
    assert rows["terminated"][rows["is_transition"]].all()
    assert not rows["truncated"].any()
    assert {0.0} == set(rows["value"][finals].tolist())


def test_groups_share_their_starts_and_whole_episodes_end_them(make_host: MakeHost) -> None:
    asked = config(whole_episodes=True, group_size=2, env_options={"length": 6})
    report, rows = play(make_host(), asked, num_envs=6, horizon=10)
    assert len(report.episodes) == 6
    seeds = [one.seed for one in report.episodes]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] != seeds[4] == seeds[5]
    assert [one.group for one in report.episodes] == [0, 0, 1, 1, 2, 2]
    assert 12 == report.num_transitions == rows["is_transition"].sum()


def test_f53_done_again_the_same_episodes_are_drawn(make_host: MakeHost) -> None:
    host = make_host()
    first, rows = play(host, config(env_options={"length": 6}))
    again, same = play(host, config(env_options={"length": 6}))
    other, _ = play(host, config(env_options={"length": 6}, position=1))
    assert [one.seed for one in first.episodes] == [one.seed for one in again.episodes]
    assert not {one.seed for one in first.episodes} & {one.seed for one in other.episodes}
    for name, column in rows.items():
        np.testing.assert_array_equal(column, same[name])


def test_f53_a_rollout_that_ends_early_publishes_nothing(make_host: MakeHost) -> None:
    payloads = MemoryPayloadStore()
    host = make_host()

    def lose(decisions: int, of: int) -> None:
        if decisions == 3:
            raise LeaseLostError("taken over")

    with pytest.raises(LeaseLostError):
        play(host, config(), payloads=payloads, on_progress=lose)
    assert payloads.metadata("p1", "a") == {}
    assert host.num_sessions == 0


def test_f49_a_failing_environment_costs_its_episode_only(
    make_host: MakeHost, tmp_path: Path
) -> None:
    options = {"fault": "segv", "at": 5, "length": 6, "once": str(tmp_path / "failed")}
    asked = config(env_options=options, isolation="process")
    report, rows = play(make_host(), asked)
    assert report.dropped == {"crashed": 1}
    assert 17 >= report.num_transitions >= 16
    for episode in report.episodes:
        assert rows["is_transition"][rows["episode"] == episode.episode].any()


@pytest.mark.parametrize(
    ("fault", "reason"), [("raise", "raised"), ("reward", "bad_output"), ("raise_reset", "raised")]
)
def test_one_failing_environment_of_64_costs_one_episode_pf32_b39_f46(
    make_host: MakeHost, tmp_path: Path, fault: str, reason: str
) -> None:
    """63 go on as they are, the failed one is played anew from the same start, the reason is told;
    a reward that is no number is never averaged in."""
    options = {"fault": fault, "at": 3, "length": 6, "once": str(tmp_path / "failed")}
    asked = config(env_options=options, whole_episodes=True, group_size=8)
    told: list[dict[str, Any]] = []
    report, rows = play(
        make_host(max_sessions=64, max_per_tenant=64), asked, num_envs=64, horizon=6,
        emit=lambda kind, values: told.append(values),
    )  # fmt: skip
    assert report.dropped == {reason: 1}
    assert told[-1]["dropped_for"] == {reason: 1}
    assert sorted(one.env for one in report.episodes) == list(range(64))
    assert [one.group for one in report.episodes] == [at // 8 for at in range(64)]
    assert len({one.seed for one in report.episodes}) == 8
    assert {one.num_steps for one in report.episodes} == {6}
    assert np.isfinite(rows["rewards"]).all()


def test_f50_rebuilds_end_and_then_the_job_fails_by_name(make_host: MakeHost) -> None:
    host = make_host(max_rebuilds=2)
    with pytest.raises(SimulatorError) as caught:
        play(host, config(env_options={"fault": "raise", "at": 2}))
    assert caught.value.details["failure"] == "raised"
    assert host.num_sessions == 0


def test_b36_an_invalid_action_ends_its_episode_and_flags_the_job(make_host: MakeHost) -> None:
    policy = CountingPolicy(bad_at=2)
    report, rows = play(make_host(), config(env_options={"length": 50}), policy=policy)
    assert report.dropped == {"invalid_action": 1}
    assert np.isfinite(rows["actions"]).all()
    assert len({one.env for one in report.episodes}) == 3


def test_b36_a_policy_that_gives_nothing_else_fails_the_job(make_host: MakeHost) -> None:
    class Broken(CountingPolicy):
        def predict(self, *arguments: Any, **named: Any) -> Predicted:
            self.bad_at = self.num_predictions
            return super().predict(*arguments, **named)

    with pytest.raises(DataError, match="not finite"):
        play(make_host(), config(), policy=Broken(), horizon=20)


def test_b37_clipped_actions_are_counted_and_the_executed_ones_kept(make_host: MakeHost) -> None:
    class Wild(CountingPolicy):
        def predict(self, *arguments: Any, **named: Any) -> Predicted:
            made = super().predict(*arguments, **named)
            return Predicted(made.actions + 5, 3, "d")

    report, rows = play(make_host(), config(env_options={"length": 50}), policy=Wild())
    assert report.num_env_steps == report.num_clipped
    used = ~rows["actions_is_pad"]
    assert (rows["executed_actions"][used] == 1).all()
    assert (rows["actions"][used] >= 5).all()


def test_a_policy_of_another_version_is_refused(make_host: MakeHost) -> None:
    with pytest.raises(DataError, match="version 3, 4 was asked for"):
        play(make_host(), config(), version=4)


def test_f39_a_full_payload_store_is_waited_for(make_host: MakeHost) -> None:
    class Filling(MemoryPayloadStore):
        full = 2

        def put(self, *arguments: Any, **named: Any) -> Any:
            if self.full:
                self.full -= 1
                raise StorageUnavailableError("full")
            return super().put(*arguments, **named)

    payloads = Filling()
    report, rows = play(make_host(), config(), payloads=payloads)
    assert report.num_rows == len(rows["next_row"])
    Filling.full = 1000
    with pytest.raises(StorageUnavailableError):
        play(make_host(), config(publish_wait_s=0.5), payloads=Filling())


def test_progress_and_videos(make_host: MakeHost, tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    kept: dict[str, bytes] = {}

    def keep(name: str, film: bytes) -> str:
        kept[name] = film
        return f"videos/{name}"

    asked = config(
        env_id="tabletop/push", cameras=("top", "wrist"), chunk=1, num_videos=2,
    )  # fmt: skip
    report, _ = play(
        make_host(), asked, policy=ExpertPolicy(), horizon=40, keep_video=keep,
        emit=lambda kind, values: events.append((kind, values)),
    )  # fmt: skip
    assert report.videos == ("videos/j1-000.mp4", "videos/j1-001.mp4")
    path = tmp_path / "one.mp4"
    path.write_bytes(kept["j1-000.mp4"])
    import av

    with av.open(str(path)) as film:
        pictures = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    first = next(one for one in report.episodes if one.env == 0)
    assert first.num_steps + 1 == len(pictures)
    assert pictures[0].shape == (128, 256, 3)
    assert len(events) == 40
    assert (
        events[-1][0], events[-1][1]["decisions"], events[-1][1]["success_rate"],
    ) == ("rollout", 40, 1.0)  # fmt: skip


def test_pf38_a_frame_looks_the_same_to_rollout_and_training(
    make_host: MakeHost, tmp_path: Path
) -> None:
    from vla_platform.datasets import Demonstrations, open_dataset
    from vla_platform.datasets.recording import make_demonstrations
    from vla_platform.envs.tabletop import Tabletop

    asked = config(env_id="tabletop/reach", cameras=("top", "wrist"), chunk=1, image_size=64)
    _, rows = play(make_host(), asked, policy=ExpertPolicy(), num_envs=1, horizon=4)
    make_demonstrations(tmp_path / "d", env=Tabletop(), episodes=1, seed=0)
    dataset = open_dataset(tmp_path / "d")
    with Demonstrations(
        dataset, cameras=["observation.images.top", "observation.images.wrist"],
        state_key="observation.state", action_key="action", chunk=1, image_size=64, episodes=[0],
        seed=0,
    ) as data:  # fmt: skip
        loaded = data.evenly_spaced(1).columns
    for name in ("images", "state", "actions", "actions_is_pad", "prompt"):
        assert (loaded[name].dtype, loaded[name].ndim) == (rows[name].dtype, rows[name].ndim)
    assert loaded["images"].shape[1:] == rows["images"].shape[1:]
    # The expert's own scene, drawn again by a session, against the decoded frame of the dataset.
    seed = int(np.random.default_rng((0, 0)).integers(2**31))
    seen = Tabletop().reset(seed)
    from vla_platform.datasets.frames import make_frame

    drawn = make_frame(seen.images["top"], 64).pixels.astype(float)
    with Demonstrations(
        dataset, cameras=["observation.images.top"], state_key=None, action_key="action", chunk=1,
        image_size=64, episodes=[0], seed=0,
    ) as data:  # fmt: skip
        samples = data.batch(0, data.num_samples).columns
    first = samples["images"][list(samples["frame"]).index(0), 0].astype(float)
    error = np.abs(first - drawn).mean()
    for turned in (drawn[::-1], drawn[:, ::-1], drawn[::-1, ::-1]):
        assert error < np.abs(first - turned).mean() / 3


def test_rollouts_of_two_tenants_share_a_host(make_host: MakeHost) -> None:
    host = make_host()
    results: dict[str, RolloutReport] = {}
    payloads = MemoryPayloadStore()

    def run(tenant: str, mark: int) -> None:
        asked = config(tenant=tenant, env_options={"length": 6, "mark": mark})
        results[tenant] = rollout(
            asked, f"j-{tenant}", 3, 6, 3, host=host, policy=CountingPolicy(), payloads=payloads
        )

    threads = [threading.Thread(target=run, args=pair) for pair in (("a", 11), ("b", 22))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for tenant, mark in (("a", 11), ("b", 22)):
        rows = payloads.get("p1", tenant)
        assert {mark} == set(rows["state"][:, 0].tolist())
        assert {mark} == set(rows["images"][:, 0, 0, 0, 0].tolist())
