"""LitServe's side of `benchmarks/inference.py`: PORT. Base64 in JSON, as fast as raw bytes."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve
from inference_peers import BATCH, split
from inference_standin import StandIn

WAIT_S = 0.005


class Api(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        self.model = StandIn()

    def decode_request(self, request):  # LitServe would take an annotation for a schema
        return split(base64.b64decode(request["row"]))

    def batch(self, inputs: list[Any]) -> list[Any]:
        return list(inputs)

    def predict(self, rows: Any) -> Any:
        return self.model([row for _, row in rows], [tenant for tenant, _ in rows])

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"actions": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(
        Api(max_batch_size=BATCH, batch_timeout=WAIT_S), accelerator="cpu", fast_queue=True
    )
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        generate_client_file=False,
        log_level="error",
        num_api_servers=1,
    )
