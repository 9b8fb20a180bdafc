"""Where audits are kept: reports, the progress of one that runs, and the seals of the last one.

    platform/audits/<tenant>/reports/<audit>.json
    platform/audits/<tenant>/progress.json
    platform/audits/<tenant>/seals/<generation>/<part>.txt

Seals are one line per folder, in listing order, read and written as streams. Two generations take
turns, so nothing is ever deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vla_storage.audit_findings import AuditReport
from vla_storage.errors import ObjectNotFoundError
from vla_storage.names import check_name
from vla_storage.objects.base import ObjectStore

PREFIX = "platform/audits/"


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A folder that an audit found whole."""

    prefix: str
    seal: str
    parent: str = ""  # id of a checkpoint of another run that it was made from


class AuditArchive:
    """The audits of one tenant."""

    def __init__(self, objects: ObjectStore, tenant: str) -> None:
        self._objects = objects
        self._prefix = f"{PREFIX}{check_name('tenant', tenant)}/"

    def reports(self) -> list[str]:
        """Ids of all audits, oldest first."""
        prefix = f"{self._prefix}reports/"
        return [
            info.key.removeprefix(prefix).removesuffix(".json")
            for info in self._objects.list(prefix)
        ]

    def report(self, audit_id: str) -> AuditReport:
        """Raises `ObjectNotFoundError`."""
        return AuditReport.from_json(self._objects.get(f"{self._prefix}reports/{audit_id}.json"))

    def latest(self) -> AuditReport | None:
        known = self.reports()
        return self.report(known[-1]) if known else None

    def keep(self, report: AuditReport) -> None:
        key = f"{self._prefix}reports/{report.audit_id}.json"
        self._objects.put(key, report.to_json(), if_absent=True)

    def progress(self) -> tuple[dict[str, Any] | None, str | None]:
        """What an audit that did not finish left, and the etag to replace it with."""
        try:
            text, etag = self._objects.get_with_etag(f"{self._prefix}progress.json")
        except ObjectNotFoundError:
            return None, None
        return json.loads(text), etag

    def save_progress(self, value: dict[str, Any], etag: str | None) -> str:
        """Raises `ObjectChangedError` or `ObjectExistsError` where another audit took over."""
        key, text = f"{self._prefix}progress.json", json.dumps(value).encode()
        if etag is None:
            return self._objects.put(key, text, if_absent=True)
        return self._objects.put(key, text, if_match=etag)

    def write_seals(self, generation: int, part: int, seals: list[Seal]) -> None:
        lines = "".join(f"{one.prefix}\t{one.seal}\t{one.parent}\n" for one in seals)
        self._objects.put(self._part(generation, part), lines.encode())

    def seals(self, generation: int, parts: int) -> Iterator[Seal]:
        for part in range(parts):
            try:
                text = self._objects.get(self._part(generation, part)).decode()
            except ObjectNotFoundError:
                continue  # its folders are checked again
            for line in text.splitlines():
                fields = line.split("\t")
                if len(fields) == 3:
                    yield Seal(prefix=fields[0], seal=fields[1], parent=fields[2])

    def _part(self, generation: int, part: int) -> str:
        return f"{self._prefix}seals/{generation}/{part:06d}.txt"
