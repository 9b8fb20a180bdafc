"""A slot's state as one tensor of bytes, in the form of its checkpoints, for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_platform.gpu_workers.slot_state import SlotState
from vla_storage import tensors

_MODULE, _OPTIMIZER = "module/", "optimizer/"


@dataclass(frozen=True)
class PackedState:
    data: Tensor  # (N,) uint8, on the CPU
    scalars: dict[str, Any]

    @classmethod
    def of(cls, state: SlotState) -> PackedState:
        named = {_MODULE + name: array for name, array in state.module.items()}
        named |= {_OPTIMIZER + name: array for name, array in state.optimizer.items()}
        data = torch.frombuffer(bytearray(tensors.encode(named)), dtype=torch.uint8)
        return cls(data, state.scalars)

    def state(self) -> SlotState:
        found = tensors.decode(self.data.numpy().tobytes())
        return SlotState(
            module={n.removeprefix(_MODULE): a for n, a in found.items() if n.startswith(_MODULE)},
            optimizer={
                name.removeprefix(_OPTIMIZER): array
                for name, array in found.items()
                if name.startswith(_OPTIMIZER)
            },
            scalars=self.scalars,
        )
