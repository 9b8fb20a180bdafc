"""mosec's side of `benchmarks/inference.py`: PORT."""

from __future__ import annotations

import sys
from typing import Any

from inference_peers import BATCH, split
from inference_standin import StandIn
from mosec import Server, Worker

WAIT_MS = 1  # faster than 5 at every load (measured)


class Forward(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.model = StandIn()

    def deserialize(self, data: bytes) -> Any:
        return split(data)

    def serialize(self, data: Any) -> bytes:
        return data.tobytes()

    def forward(self, data: list[Any]) -> list[Any]:
        return list(self.model([row for _, row in data], [tenant for tenant, _ in data]))


if __name__ == "__main__":
    port = sys.argv[1]
    sys.argv = ["mosec", "--port", port, "--address", "127.0.0.1", "--log-level", "error"]
    server = Server()
    server.append_worker(Forward, num=1, max_batch_size=BATCH, max_wait_time=WAIT_MS)
    server.run()
