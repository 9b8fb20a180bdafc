"""The rows of a fine-tuning job, and which rank trains which of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_platform.gpu_workers.ranks.commands import Source
from vla_platform.gpu_workers.ranks.share import spread
from vla_platform.gpu_workers.samples import ROW
from vla_storage.errors import PayloadNotFoundError
from vla_storage.payloads import PayloadStore

FRAMES = "frame_digest"


def fetch_batch(
    payloads: PayloadStore, partition_id: str, tenant_id: str, *, num_ranks: int
) -> tuple[dict[str, Any], Source | None]:
    """What rank 0 trains of a batch, and where the other ranks find their rows.

    Rows go by the digests of their frames, which alone are read of the rows of others. Raises
    `PayloadError` where the samples are lost.
    """
    if num_ranks == 1:
        return dict(payloads.arrays(partition_id, tenant_id)), None
    there = payloads.metadata(partition_id, tenant_id)
    if not there:
        raise PayloadNotFoundError(f"partition {partition_id} is gone", columns=[])
    rows = next(iter(there.values())).rows
    homes = list(rows)
    if FRAMES in there:
        digests = payloads.arrays(partition_id, tenant_id, [FRAMES], rows)[FRAMES]
        homes = [int.from_bytes(digest.tobytes()[:8], "little") for digest in digests]
    shares = [tuple(rows[at] for at in mine) for mine in spread(homes, num_ranks=num_ranks)]
    source = Source(
        partition_id=partition_id, tenant_id=tenant_id, columns=None, rows=tuple(shares)
    )
    own = payloads.arrays(partition_id, tenant_id, None, shares[0])
    return {**own, ROW: np.array(shares[0], np.int64)}, source
