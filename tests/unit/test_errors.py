"""Every error pickles, keeps its details and has a stable code of its own."""

from __future__ import annotations

import json
import pickle

import pytest

import vla_platform.errors
import vla_storage.errors
from vla_storage.errors import CodedError


def all_errors(kind: type[CodedError] = CodedError) -> list[type[CodedError]]:
    return [kind] + [error for child in kind.__subclasses__() for error in all_errors(child)]


@pytest.mark.parametrize("kind", all_errors())
def test_round_trips_through_pickle_and_json(kind: type[CodedError]):
    error = kind("frame 3 is not finite", episode=1, frame=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(error) is type(again)
    assert error.to_dict() == again.to_dict()
    assert error.to_dict() == json.loads(json.dumps(error.to_dict()))
    assert str(again) == "frame 3 is not finite"


def test_codes_are_unique():
    codes = [kind.code for kind in all_errors()]
    assert len(codes) == len(set(codes))


def test_the_tree_drawn_on_top_of_each_file_is_complete():
    for module in (vla_platform.errors, vla_storage.errors):
        drawn = module.__doc__ or ""
        missing = [
            kind.__name__
            for kind in all_errors()
            if kind.__module__ == module.__name__ and kind.__name__ not in drawn
        ]
        assert missing == [] or missing == ["CodedError"]
