"""The Celery application: queues, the one table of routes, and what every worker agrees on.

    celery -A vla_platform.app:app worker -Q control

Celery messages are hints to look at the ledger. They may be lost or come twice; the ledger decides.
"""

from __future__ import annotations

from celery import Celery

from vla_platform.broker import DELIVERY, environment_queues, queue
from vla_platform.control.deafness import install as install_hearing
from vla_platform.control.startup import install_gates
from vla_platform.settings import Settings, load_settings
from vla_platform.stack.readiness import announce
from vla_platform.telemetry import install as install_telemetry

QUEUES = ("control", "sft", "graders", "advantages", "training", "audit")
"""Beside these, `rollout.<harness>` and `evaluation.<harness>` of each harness."""

TASK_ROUTES = {
    "control.*": {"queue": "control"},
    "sft.*": {"queue": "sft"},
    "graders.*": {"queue": "graders"},
    "advantages.*": {"queue": "advantages"},
    "training.*": {"queue": "training"},
    "audit.*": {"queue": "audit"},
}
"""Ingress tasks have no route: tenants publish them on their own queues (`ingress.<tenant>`).
Rollouts and evaluations have none either: their senders name the queue of a harness."""

TASK_MODULES = (
    "vla_platform.tasks.audit",
    "vla_platform.tasks.control",
    "vla_platform.tasks.evaluation",
    "vla_platform.tasks.ingress",
    "vla_platform.tasks.rollout",
    "vla_platform.tasks.sft",
    "vla_platform.tasks.graders",
    "vla_platform.tasks.advantages",
    "vla_platform.tasks.training",
)


def create_app(settings: Settings) -> Celery:
    app = Celery("vla", include=list(TASK_MODULES))
    own_queues = environment_queues(settings.harness)
    app.conf.update(
        broker_url=settings.redis_url,
        broker_transport="vla_platform.broker:Transport",
        broker_transport_options=DELIVERY,
        broker_connection_retry_on_startup=True,
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_queues=[queue(name) for name in (*QUEUES, *own_queues)],
        task_default_queue="control",
        task_routes=TASK_ROUTES,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        task_send_sent_event=True,
        worker_hijack_root_logger=True,
        worker_redirect_stdouts=False,
        beat_scheduler="vla_platform.control.beat.Scheduler",
        beat_max_loop_interval=2,
        redbeat_redis_url=settings.redis_url,
        redbeat_key_prefix="vla:beat:",
        redbeat_lock_timeout=30,
        beat_schedule={
            "reconcile": {"task": "control.reconcile", "schedule": settings.reconcile_s},
            "audit": {"task": "audit.run", "schedule": settings.audit_s},
        },
        timezone="UTC",
    )
    return app


app = create_app(load_settings())
install_gates(app)
install_hearing(app)
install_telemetry(app, load_settings())

if load_settings().is_a("gpu"):
    from vla_platform.gpu_workers.bootsteps import install

    install(app)
elif load_settings().is_a("control"):
    from vla_platform.control.bootsteps import install as install_ingress

    install_ingress(app)
elif load_settings().harness:
    from vla_platform.envs.worker import install as install_host

    install_host(app)
if (ready_file := load_settings().ready_file) is not None:
    announce(ready_file)
