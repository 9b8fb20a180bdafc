"""Learning curves of one run, drawn into a panel."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

Points = Sequence[tuple[int, float]]
"""(step, value), by step."""

_BLUE, _ORANGE, _GREY, _GREEN = "#1f5fa8", "#d9600f", "#555555", "#2b7a3f"
_LOG_ABOVE = 30.0  # ratio of largest to smallest loss from which the axis is logarithmic


def smooth(values: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the values; at the ends, over those that are there."""
    half = max(2, len(values) // 40)
    return [fmean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def draw_losses(
    axes: Axes,
    title: str,
    *,
    loss: Points,
    heldout: Points,
    evaluated: Sequence[tuple[int, float, float, float]] = (),
) -> None:
    """Training loss, raw and smoothed, and held-out points; on an axis of its own, evaluations as
    (step, rate, low, high)."""
    if loss:
        steps, values = zip(*loss, strict=True)
        axes.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=1, label="training, per step")
        axes.plot(steps, smooth(values), color=_BLUE, linewidth=2, label="training, smoothed")
    if heldout:
        steps, values = zip(*heldout, strict=True)
        axes.plot(
            steps, values, color=_ORANGE, marker="o", markersize=5, linestyle="--", label="held out"
        )
        for place in (0, -1):
            axes.annotate(
                f"{values[place]:.3g}",
                (steps[place], values[place]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                fontsize=9,
                color=_ORANGE,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
            )
    if evaluated:
        at, rate, low, high = (np.array(column) for column in zip(*evaluated, strict=True))
        right = axes.twinx()
        right.errorbar(
            at, rate, yerr=(rate - low, high - rate),
            color=_GREEN, marker="s", markersize=5, linestyle=":", capsize=3,
        )  # fmt: skip
        right.set_ylabel("success, evaluated (95 %)", color=_GREEN)
        right.set_ylim(-0.03, 1.13)
        right.spines["top"].set_visible(False)
    if loss or heldout:
        axes.legend(frameon=False, fontsize=9)
        every = [value for _, value in (*loss, *heldout)]
        if min(every) > 0 and max(every) / min(every) > _LOG_ABOVE:
            axes.set_yscale("log")
        axes.margins(y=0.12)
    else:
        axes.text(0.5, 0.5, "no losses reported", ha="center", transform=axes.transAxes)
    _frame(axes, title, x="training step", y="loss")


def draw_success(
    axes: Axes,
    title: str,
    *,
    success: Points,
    returns: Points,
    evaluated: Sequence[tuple[int, float, float, float]],
) -> None:
    """Success of the exploring policy by rollout, its return on an axis of its own, and
    evaluations as (rollout, rate, low, high)."""
    rollouts, rates = zip(*success, strict=True)
    axes.plot(rollouts, rates, color=_BLUE, alpha=0.3, linewidth=1)
    axes.plot(rollouts, smooth(rates), color=_BLUE, linewidth=2, label="success, exploring")
    axes.set_ylim(-0.03, 1.13)
    if evaluated:
        at, rate, low, high = (np.array(column) for column in zip(*evaluated, strict=True))
        axes.errorbar(
            at, rate, yerr=(rate - low, high - rate),
            color=_ORANGE, marker="o", markersize=5, linestyle="none", capsize=3, zorder=3,
            label="success, evaluated (95 %)",
        )  # fmt: skip
        for place in range(len(at)):
            axes.annotate(
                f"{rate[place]:.2f}",
                (at[place], low[place]),
                xytext=(0, -13),
                textcoords="offset points",
                ha="left" if 2 * at[place] < rollouts[-1] else "right",
                fontsize=9,
                color=_ORANGE,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
            )
    handles, labels = axes.get_legend_handles_labels()
    if returns:
        right = axes.twinx()
        steps, values = zip(*returns, strict=True)
        (line,) = right.plot(steps, smooth(values), color=_GREEN, linewidth=1.5, linestyle=":")
        right.set_ylabel("mean return", color=_GREEN)
        right.margins(y=0.3)
        right.spines["top"].set_visible(False)
        handles, labels = [*handles, line], [*labels, "return"]
    axes.legend(handles, labels, frameon=False, fontsize=8, loc="lower right")
    _frame(axes, title, x="rollout", y="success rate")


def _frame(axes: Axes, title: str, *, x: str, y: str) -> None:
    # The font has no glyphs beyond Latin, and "$" would begin a formula.
    shown = title.encode("ascii", "replace").decode("ascii")
    axes.set_title(shown[:80], fontsize=11, parse_math=False)
    axes.set_xlabel(x, color=_GREY)
    axes.set_ylabel(y, color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
