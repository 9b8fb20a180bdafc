"""A round of the reconciler is everybody's: one tenant's broken run ends nothing of it."""

from __future__ import annotations

import pytest

from vla_platform.control.reconciler import _each
from vla_platform.errors import SpecError, UnavailableError


@pytest.mark.parametrize("error", [SpecError("no such field"), ValueError("not JSON")])
def test_an_item_that_cannot_be_served_holds_up_no_other(error: Exception) -> None:
    served: list[str] = []

    def serve(run: str) -> None:
        if run == "broken":
            raise error
        served.append(run)

    _each("produce", ["first", "broken", "last"], serve)
    assert served == ["first", "last"]


def test_a_service_that_is_down_ends_the_round() -> None:
    def serve(run: str) -> None:
        raise UnavailableError("the control Redis does not answer")

    with pytest.raises(UnavailableError):
        _each("produce", ["first"], serve)
