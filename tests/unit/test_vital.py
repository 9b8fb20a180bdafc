"""A worker that lost a thread it cannot do without would hold its leases and do nothing."""

from __future__ import annotations

import pytest

from vla_platform import vital


def test_the_process_ends_with_a_vital_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, object]] = []
    monkeypatch.setattr(vital, "end_process", lambda why, reason: ended.append((why, reason)))

    def beat() -> None:
        raise KeyError("lease")

    thread = vital.vital_thread(beat, name="heartbeat")
    thread.start()
    thread.join(5)
    assert ended == [("thread_failed", "heartbeat: KeyError('lease')")]
