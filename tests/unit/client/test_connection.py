"""URLs are checked, typed errors come back as they were raised."""

from __future__ import annotations

import pytest

from vla_platform.client import Platform
from vla_platform.errors import DatasetError, PlatformError, QuotaError, SpecError, to_error


@pytest.mark.parametrize(
    "url", ["", "redis://a:b@host/0", "vla://host:1/0?bucket=x", "vla://a:b@host:1/0"]
)
def test_a_url_that_is_none_of_ours_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="vla tenants add"):
        Platform(url)


@pytest.mark.parametrize("kind", [DatasetError, QuotaError, SpecError])
def test_errors_survive_the_wire(kind: type[PlatformError]) -> None:
    error = kind("no", path="x")
    again = to_error(error.to_dict())
    assert type(again) is kind
    assert again.to_dict() == error.to_dict()


def test_an_unknown_code_is_still_a_platform_error() -> None:
    again = to_error({"code": "of-a-newer-version", "message": "hm"})
    assert type(again) is PlatformError
    assert str(again) == "hm"
