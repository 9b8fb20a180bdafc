"""Loss curves and the HTML report."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vla_platform.client.curves import smooth
from vla_platform.client.report import (
    RunReport,
    Video,
    evaluated_events,
    facts,
    render_curves,
    write_report,
)
from vla_platform.control.trends import Point

HOSTILE = "<script>alert(1)</script> \u202e\N{ROBOT FACE} \"'><img src=x onerror=alert(2)> $\\frac{"


def events(num_steps: int = 60, start: float = 0.4) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": start * math.exp(-step / 25) + 0.05 + 0.02 * float(rng.random()),
            "lr": 1e-3,
            "grad_norm": 1.0,
            "samples_per_s": 50.0,
            "group_size": 2,
            "cache_hits": 6,
            "cache_misses": 2,
        }
        for step in range(1, num_steps + 1)
    ]
    heldout = [{"step": step, "heldout_loss": 0.5 - 0.005 * step} for step in (0, 30, num_steps)]
    return rows + heldout


def run(**changes: Any) -> RunReport:
    arguments: dict[str, Any] = {
        "tenant": "reach-lab",
        "policy": "reach",
        "workload_id": "wl-1",
        "spec": {"kind": "sft", "steps": 60},
        "events": events(),
        "checkpoints": [{"id": "reach/wl-1/60", "step": 60, "manifest_ok": True}],
        "summary": {"policy_version": 60},
    }
    return RunReport(**{**arguments, **changes})


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_has_a_page_an_overview_and_a_curve_per_run(tmp_path: Path) -> None:
    runs = [run(), run(tenant="g1-lab", policy="pick", workload_id="wl-2")]
    paths = write_report(tmp_path / "report", runs)
    assert sorted(tmp_path.joinpath("report").iterdir()) == sorted(
        [paths.html, paths.overview, *paths.curves.values()]
    )
    assert list(paths.curves) == ["wl-1", "wl-2"]
    with Image.open(paths.overview) as both, Image.open(paths.curves["wl-1"]) as one:
        assert both.width == 2 * one.width
        assert both.height == one.height
    page = Page(paths.html.read_text(encoding="utf-8"))
    for expected in ("reach-lab/reach", "g1-lab/pick", "reach/wl-1/60", '"steps": 60', "75 %"):
        assert expected in page.text
    assert page.tags.count("img") == 2


def test_page_loads_nothing_from_outside(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, [run()]).html.read_text(encoding="utf-8"))
    links = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert links
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)


def test_b04_hostile_text_is_kept_exactly_and_never_becomes_markup(tmp_path: Path) -> None:
    hostile = run(
        tenant=HOSTILE,
        policy=HOSTILE,
        workload_id=HOSTILE,
        spec={"description": HOSTILE, "display_name": HOSTILE, HOSTILE: [HOSTILE]},
        checkpoints=[{HOSTILE: HOSTILE}],
        summary={HOSTILE: HOSTILE},
    )
    paths = write_report(tmp_path, [hostile])
    page = Page(paths.html.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("img") == 1
    assert page.text.count(HOSTILE) >= 6
    assert tmp_path == paths.curves[HOSTILE].parent


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "loss": math.nan}, {"step": 2, "loss": None}, {"message": "started"}],
        [{"step": 1, "loss": 0.5}],
        [{"step": 0, "heldout_loss": 0.5}],
        [{"step": 1, "loss": 1e4}, {"step": 2, "loss": 1e-3}],
        [{"step": 1, "loss": 0.0}, {"step": 2, "loss": -3.0}],
    ],
)
def test_sparse_and_odd_events_still_give_a_picture(rows: list[dict[str, Any]]) -> None:
    picture = Image.open(io.BytesIO(render_curves([run(events=rows)])))
    assert picture.format == "PNG"
    assert facts(run(events=rows))["samples_per_s"] is None


def test_a_step_that_was_reported_twice_counts_once() -> None:
    rows = [{"step": 2, "loss": 3.0}, {"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0}]
    assert run(events=rows).series("loss") == [(1, 4.0), (2, 2.0)]


def test_facts_come_from_the_events() -> None:
    found = facts(run())
    assert (found["steps"], found["group_size"], found["samples_per_s"]) == (60, 2, 50)
    assert found["cache_hit_share"] == 0.75
    assert found["heldout_first"] == 0.5
    assert found["heldout_last"] == pytest.approx(0.2)


def test_smoothing_keeps_lines_straight_and_flattens_noise() -> None:
    line = [5.0 - 0.1 * step for step in range(50)]
    np.testing.assert_allclose(smooth(line)[2:-2], line[2:-2])
    zigzag = [float(step % 2) for step in range(50)]
    assert max(np.abs(np.array(smooth(zigzag)[2:-2]) - 0.5)) < 0.2


def test_equal_runs_give_equal_bytes_and_no_run_is_refused(tmp_path: Path) -> None:
    assert render_curves([run()]) == render_curves([run()])
    with pytest.raises(ValueError, match="needs a run"):
        write_report(tmp_path, [])


def learning() -> list[dict[str, Any]]:
    """Events of a run of reinforcement learning that was evaluated before and after."""
    rollouts = [
        {
            "kind": "rollout",
            "step": number,
            "success_rate": 0.5 + 0.4 * number / 40 + (0.1 if number % 2 else -0.1),
            "mean_return": 0.7 + number / 100,
        }
        for number in range(1, 41)
    ]
    evaluations = [
        {"step": step, "evaluated_success": rate, "evaluated_low": rate - 0.08,
         "evaluated_high": rate + 0.06}
        for step, rate in ((0, 0.48), (40, 0.85))
    ]  # fmt: skip
    return [*rollouts, *evaluations]


def test_what_learns_by_reward_shows_success_and_films(tmp_path: Path) -> None:
    film = b"\0\0\0\x18ftypmp42"
    videos = [Video(f"after, {HOSTILE}", film)]
    paths = write_report(tmp_path, [run(events=learning(), videos=videos), run(workload_id="w2")])
    found = facts(run(events=learning()))
    assert (found["success_first"], found["success_last"], found["steps"]) == (0.48, 0.85, None)
    assert facts(run())["success_first"] is None
    page = Page(paths.html.read_text(encoding="utf-8"))
    sources = [value for name, value in page.attributes if name == "src" and value]
    assert f"data:video/mp4;base64,{base64.b64encode(film).decode()}" in sources
    assert page.tags.count("video") == 1
    assert "script" not in page.tags
    assert f"after, {HOSTILE}" in page.text
    assert "0.48 → 0.85" in page.text
    assert render_curves([run(events=learning())]) != render_curves([run()])


def test_success_without_evaluations_or_returns_still_gives_a_picture() -> None:
    rows = [{"step": 1, "success_rate": 0.5}, {"step": 2, "success_rate": None}]
    assert Image.open(io.BytesIO(render_curves([run(events=rows)]))).format == "PNG"


def test_a_runs_own_evaluations_are_in_its_report(tmp_path: Path) -> None:
    point = Point(
        evaluation_id="sft-1-10", suite="tabletop/reach", policy_version=10, num_episodes=4,
        num_successes=2, success_rate=0.5, interval_low=0.15, interval_high=0.85, finished=0.0,
    )  # fmt: skip
    others = (replace(point, evaluation_id=one) for one in ("sft-10-10", "nightly-2026", "sft-1-x"))
    own = evaluated_events([point, *others], "sft-1")
    assert [(event["step"], event["evaluated_success"]) for event in own] == [(10, 0.5)]
    losses = [{"kind": "step", "step": step, "loss": 1.0 / step} for step in range(1, 11)]
    run = RunReport(
        tenant="a", policy="p", workload_id="sft-1", spec={}, events=[*losses, *own],
        checkpoints=[], summary={},
    )  # fmt: skip
    assert facts(run)["success_last"] == 0.5
    assert write_report(tmp_path, [run]).overview.stat().st_size > 1000
