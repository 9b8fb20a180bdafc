"""Turns on the device: inference first, training never starved."""

from __future__ import annotations

import threading
import time

import pytest

from vla_platform.gpu_workers.device import DeviceTurns, Turn
from vla_platform.gpu_workers.utilisation import Shares


def test_one_at_a_time_and_inference_goes_first():
    turns, order = DeviceTurns(patience_s=30.0), list[str]()
    waiting = threading.Barrier(3)

    def run(name: str, turn: str) -> None:
        waiting.wait()
        with getattr(turns, turn)():
            order.append(name)

    with turns.inference():
        threads = [
            threading.Thread(target=run, args=args)
            for args in (("train", "training"), ("infer", "inference"))
        ]
        for thread in threads:
            thread.start()
        waiting.wait()
        while turns._inference_waits == 0 or turns._training_since is None:
            time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == ["infer", "train"]


def test_training_gets_its_turn_under_a_flood_of_inference():
    turns, stop = DeviceTurns(patience_s=0.02), threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with turns.inference():
                time.sleep(0.001)

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    for _ in range(3):
        with turns.training():
            pass
    waited = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join()
    assert waited < 5.0


def test_a_pause_lets_inference_in_between():
    turns, order = DeviceTurns(patience_s=30.0), list[str]()

    def infer() -> None:
        with turns.inference():
            order.append("infer")

    with turns.training():
        order.append("update 1")
        thread = threading.Thread(target=infer)
        thread.start()
        while turns._inference_waits == 0:
            time.sleep(0.001)
        turns.pause()
        order.append("update 2")
    thread.join()
    assert order == ["update 1", "infer", "update 2"]


def test_each_ones_time_on_the_device_is_counted():
    turns = DeviceTurns()
    with turns.training():
        time.sleep(0.02)
        seen = turns.busy_s()  # the turn goes on
    with turns.inference():
        pass
    found = turns.busy_s()
    assert 0.02 <= seen[Turn.TRAINING] <= found[Turn.TRAINING]
    assert found[Turn.INFERENCE] < found[Turn.TRAINING]
    assert found == turns.busy_s()


def test_shares_are_of_the_last_minute():
    shares = Shares(window_s=60.0)

    def at(now_s: float, training_s: float) -> float:
        return shares.take(now_s, {Turn.TRAINING: training_s, Turn.INFERENCE: 0.0})[Turn.TRAINING]

    assert at(0.0, 0.0) == 0.0
    assert at(10.0, 5.0) == 0.5
    assert at(60.0, 5.0) == pytest.approx(5 / 60)
    assert at(80.0, 15.0) == pytest.approx(10 / 70)  # since 10.0, the last before the window
    assert at(200.0, 15.0) == 0.0
