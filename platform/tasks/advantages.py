"""Tasks of the advantages queue."""

from __future__ import annotations

import os
import socket

from celery import shared_task

from vla_platform.control import advantages
from vla_platform.control.services import services


@shared_task(name="advantages.compute")
def compute() -> int:
    return advantages.compute_ready(services(), f"{socket.gethostname()}-{os.getpid()}")
