"""Every payload store against a plain dict, with whatever order of calls hypothesis finds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from vla_storage.errors import PayloadExistsError, PayloadNotFoundError
from vla_storage.payloads import FrameColumn, Frames, PayloadStore

pytestmark = pytest.mark.services

_number = itertools.count()
TENANTS = ("a", "ab")
KINDS = {"dense": "dense", "big": "dense", "ragged": "ragged", "frames": "frames"}
names = st.sampled_from(sorted(KINDS))
row_sets = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)
tenants = st.sampled_from(TENANTS)


def value_of(name: str, row: int, version: int) -> np.ndarray:
    """A cell's content follows from its place and version."""
    rng = np.random.default_rng([row, version, len(name)])
    if name == "dense":
        return rng.normal(size=3).astype(np.float32)
    if name == "big":  # large enough for a part, a view and a pin of its own
        return rng.integers(0, 255, 70_000, dtype=np.uint8)
    if name == "ragged":
        return rng.integers(0, 9, (row, 2))
    # Frames that several rows share.
    shown = [(row + step) // 2 for step in range(row % 3)]
    frames = [np.full((4, 4, 3), 10 * frame + version, np.uint8) for frame in shown]
    return np.stack(frames) if frames else np.empty((0, 4, 4, 3), np.uint8)


class Against(RuleBasedStateMachine):
    """`model[tenant]` is `{(column, row): version}`; consumed rows by consumer."""

    store: PayloadStore

    def __init__(self) -> None:
        super().__init__()
        self.partition = f"p{next(_number)}"
        self.model: dict[str, dict[tuple[str, int], int]] = {tenant: {} for tenant in TENANTS}
        self.marked: dict[str, set[int]] = {tenant: set() for tenant in TENANTS}

    @rule(
        tenant=tenants, columns=st.lists(names, min_size=1, max_size=3, unique=True),
        rows=row_sets, version=st.sampled_from([0, 0, 0, 1]),
    )  # fmt: skip
    def put(self, tenant: str, columns: list[str], rows: list[int], version: int) -> None:
        data: dict[str, Any] = {}
        for name in columns:
            cells = [value_of(name, row, version) for row in rows]
            kind = KINDS[name]
            data[name] = (
                np.stack(cells) if kind == "dense" else Frames(cells) if kind == "frames" else cells
            )
        model = self.model[tenant]
        same = all(
            model.get((name, row), version) == version
            or np.array_equal(value_of(name, row, model[name, row]), value_of(name, row, version))
            for name in columns
            for row in rows
        )
        if same:
            self.store.put(self.partition, tenant, data, rows, ttl_s=600)
            for name, row in itertools.product(columns, rows):
                model.setdefault((name, row), version)
        else:
            with pytest.raises(PayloadExistsError):
                self.store.put(self.partition, tenant, data, rows, ttl_s=600)

    @rule(
        tenant=tenants, columns=st.lists(names, min_size=1, max_size=3, unique=True),
        rows=row_sets, copy=st.booleans(),
    )  # fmt: skip
    def get(self, tenant: str, columns: list[str], rows: list[int], copy: bool) -> None:
        model = self.model[tenant]
        if any((name, row) not in model for name in columns for row in rows):
            with pytest.raises(PayloadNotFoundError):
                self.store.get(self.partition, tenant, columns, rows, copy=copy)
            return
        found = self.store.get(self.partition, tenant, columns, rows, copy=copy)
        assert columns == list(found)
        for name in columns:
            column: Any = found[name]
            for index, row in enumerate(rows):
                expected = value_of(name, row, model[name, row])
                if isinstance(column, FrameColumn):
                    cell = np.array(column.row(index), np.uint8).reshape(-1, 4, 4, 3)
                else:
                    cell = column[index]
                assert (expected.dtype, expected.shape) == (cell.dtype, cell.shape)
                assert expected.tobytes() == cell.tobytes()

    @rule(tenant=tenants, rows=row_sets)
    def mark(self, tenant: str, rows: list[int]) -> None:
        if not self.model[tenant]:
            with pytest.raises(PayloadNotFoundError):
                self.store.mark_consumed(self.partition, tenant, "c", rows)
            return
        fresh = self.store.mark_consumed(self.partition, tenant, "c", rows)
        assert [row for row in rows if row not in self.marked[tenant]] == fresh
        self.marked[tenant].update(rows)

    @rule(tenant=tenants)
    def clear(self, tenant: str) -> None:
        assert bool(self.model[tenant]) == self.store.clear(self.partition, tenant)
        self.model[tenant].clear()
        self.marked[tenant].clear()

    @invariant()
    def metadata_is_what_was_put(self) -> None:
        for tenant, model in self.model.items():
            infos = self.store.metadata(self.partition, tenant)
            assert {name for name, _ in model} == infos.keys()
            for name, info in infos.items():
                rows = sorted(row for column, row in model if column == name)
                assert rows == list(info.rows)
                if KINDS[name] != "frames":
                    cells = [value_of(name, row, model[name, row]) for row in rows]
                    assert [cell.shape for cell in cells] == list(info.shapes)
                    assert sum(cell.nbytes for cell in cells) == info.size_bytes

    @invariant()
    def ready_rows_have_all_columns(self) -> None:
        for tenant, model in self.model.items():
            both = [
                row
                for row in range(6)
                if {("dense", row), ("ragged", row)} <= model.keys()
                and row not in self.marked[tenant]
            ]
            assert both == self.store.ready_rows(
                self.partition, tenant, ["dense", "ragged"], consumer="c"
            )

    def teardown(self) -> None:
        for tenant in TENANTS:
            self.store.clear(self.partition, tenant)


def test_the_store_is_a_dict_of_cells(payloads: PayloadStore) -> None:
    machine = type("Bound", (Against,), {"store": payloads})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert payloads.partitions() == []
