"""Beat that one bad entry does not stop: RedBeat ends its tick, and itself, on an entry that it
cannot decode."""

from __future__ import annotations

import logging
from typing import Any

from redbeat import RedBeatScheduler, RedBeatSchedulerEntry

_log = logging.getLogger(__name__)


class IsolatedEntry(RedBeatSchedulerEntry):  # type: ignore[misc]
    """An entry that cannot be read counts as absent: RedBeat then takes it off its list."""

    @classmethod
    def from_key(cls, key: str, app: Any = None) -> Any:
        try:
            return super().from_key(key, app=app)
        except KeyError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            _log.error("action=beat_entry_disabled entry=%s reason=%r", key, error)
            raise KeyError(key) from error


class Scheduler(RedBeatScheduler):  # type: ignore[misc]
    Entry = IsolatedEntry
