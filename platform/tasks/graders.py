"""Tasks of the graders queue."""

from __future__ import annotations

import os
import socket

from celery import shared_task

from vla_platform.control import grading
from vla_platform.control.services import services


@shared_task(name="graders.grade")
def grade() -> int:
    return grading.grade_waiting(services(), f"{socket.gethostname()}-{os.getpid()}")
