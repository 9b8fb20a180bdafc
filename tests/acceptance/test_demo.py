"""`make demo`: what fine-tunes gets better, and what learns by reward succeeds more often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_tenants_learn_by_reward_beside_two_that_fine_tune(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--var", str(tmp_path), "--g1", str(tmp_path / "none")]
    subprocess.run([*command, "--steps", "40"], check=True, timeout=1700)
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    tenants = report["tenants"]
    assert list(tenants) == ["g1-lab", "reach-lab", "ppo-lab", "grpo-lab"]
    for tenant in ("ppo-lab", "grpo-lab"):
        learned = tenants[tenant]
        assert learned["success_first"] <= 0.5
        # Apart beyond chance: the 95 % intervals of both evaluations do not meet.
        assert learned["success_last_interval"][0] > learned["success_first_interval"][1]
        assert learned["updates"] == learned["policy_version"]
        assert len(list((tmp_path / "demo").glob(f"{tenant}-*-after.mp4"))) == 4
