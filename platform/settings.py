"""Settings of the platform's processes, read once from the environment and then frozen.

Every variable is `VLA_<FIELD>`. `vla up` sets them for the processes it starts, from its own; on a
cluster the deployment does. Elsewhere `os.environ` is only handed on to child processes, or set for
a library.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vla_platform.control.training_job import ReserveLimits
from vla_platform.errors import ConfigurationError


class Settings(BaseModel):
    """What a platform process (worker, beat, Flower, collector, operator's command line) needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str = Field(description="control Redis: broker and ledger")
    payload_url: str = Field(
        description="payload Redis: samples; never the control Redis; several by comma"
    )
    arena: Path | None = Field(
        None, description="shared-memory arena for producers and GPU workers of this host"
    )
    payload_quota_bytes: int = Field(4 << 30, ge=1, description="samples that a tenant may hold")
    payload_watermark: float = Field(
        0.9, gt=0, le=1, description="used share of a payload Redis above which samples go to S3"
    )
    payload_spill: bool = Field(True, description="False: over the watermark producers wait")
    s3_endpoint: str | None = Field(None, description="None: the AWS default")
    s3_access_key: str | None = None
    s3_secret_key: str | None = None
    s3_bucket: str = "vla"
    signing_key_file: Path = Field(description="the platform's HMAC key for manifests")
    var: Path = Path("var")
    dataset_roots: str = Field("", description="folders, separated by ':', that specs may name")
    base_models: str = Field(
        "tiny", description="what a GPU worker serves: `name` or `name=hub-id-or-path`, by comma"
    )
    device: str = Field("auto", description="auto | cpu | cuda")
    training_ranks: int = Field(
        1, ge=1, description="processes of a GPU worker that train together, a device each"
    )
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    feature_cache_bytes: int = Field(512 << 20, ge=0, description="0 switches the cache off")
    update_tokens: int = Field(
        1 << 15, ge=1, description="feature tokens of one pass of an action module in an RL update"
    )
    max_group: int = Field(8, ge=1, description="training jobs that may share one backbone forward")
    lease_s: float = Field(10.0, gt=0.5, description="how long a silent worker keeps its work")
    gpu_roles: str = Field("training,inference", description="what a GPU worker does, by comma")
    inference_batch: int = Field(32, ge=1, description="samples of one batch at most")
    inference_wait_ms: float = Field(5.0, ge=0.0, description="longest wait for a fuller batch")
    training_watchdog_s: float = Field(600.0, gt=0.0, description="a longer step hangs")
    inference_watchdog_s: float = Field(120.0, gt=0.0, description="a longer forward hangs")
    module_device_bytes: int = Field(1 << 30, ge=0, description="idle modules kept on the device")
    module_host_bytes: int = Field(4 << 30, ge=0, description="modules kept in memory in all")
    slice_s: float = Field(5.0, gt=0.0, description="longest run of one draining task")
    reconcile_s: float = Field(2.0, gt=0.0)
    min_schedule_s: float = Field(300.0, ge=60.0, description="between firings of a schedule")
    audit_s: float = Field(24 * 3600.0, gt=0.0, description="between audits of all tenants")
    max_running_per_tenant: int = Field(4, ge=1)
    max_rollouts_per_tenant: int = Field(1, ge=1, description="rollouts that step at once")
    max_rollouts: int = Field(3, ge=1, description="the same, of all tenants")
    share_window_s: float = Field(
        5.0, gt=0.0, description="worker-seconds a tenant may be ahead of its share"
    )
    max_pending_per_tenant: int = Field(1000, ge=1)
    failpoint: str = Field("", description="for tests of failures; see failpoints.py")
    harness: str = Field("", description="which one this process, an environment host, serves")
    env_isolation: Literal["thread", "shared", "process"] = Field(
        "thread", description="of every session at least; a run's spec may ask for more"
    )
    env_processes: int = Field(2, ge=1, description="child processes for `shared` isolation")
    env_memory_bytes: int = Field(6 << 30, ge=1 << 28, description="of a host, or of a child")
    max_sessions: int = Field(64, ge=1, description="sessions of one host")
    max_sessions_per_tenant: int = Field(
        32, ge=1, description="on one host; of remote ones, on all hosts of a harness"
    )
    session_lease_s: float = Field(120.0, gt=0.0, description="a silent session is closed")
    external_hosts: str = Field(
        "", description="host[:port] names that `external` environments may connect to, by comma"
    )
    role: str = Field(
        "", description="control | sft | gpu | beat | flower | metrics | env-..., or control-2"
    )
    host: str = Field("127.0.0.1", description="where collector and page listen")
    port: int = Field(0, description="where the metrics collector listens; 0: 9100")
    log_format: Literal["text", "json"] = Field("text", description="of this process's lines")
    traces: str = Field(
        "", description="spans: an OTLP collector's http(s) address, or a folder for JSON lines"
    )
    metrics_sinks: str = Field("", description="kind=target by comma; see metrics/sinks")
    page_user: str = "admin"
    page_password: str = Field("", description="of the operators' page")
    tls_cert: Path | None = Field(None, description="of the operators' page; None: no TLS")
    tls_key: Path | None = None
    ready_file: Path | None = Field(None, description="created once the process is ready")

    def reserve_limits(self) -> ReserveLimits:
        return ReserveLimits(
            tenant_rollouts=self.max_rollouts_per_tenant,
            rollouts=self.max_rollouts,
            share_window_s=self.share_window_s,
        )

    @property
    def payload_urls(self) -> tuple[str, ...]:
        """Each payload Redis; the first also carries streams and sessions."""
        return urls_of(self.payload_url)

    def roots(self) -> tuple[Path, ...]:
        return tuple(Path(part).resolve() for part in self.dataset_roots.split(":") if part)

    def is_a(self, kind: str) -> bool:
        """Whether this process is one of a kind, such as `gpu-2` of `gpu`."""
        return self.role == kind or self.role.startswith(f"{kind}-")

    def does(self, gpu_role: str) -> bool:
        return gpu_role in self.gpu_roles.split(",")

    def served_models(self) -> dict[str, str]:
        """Base model name to hub id, local path or built-in name."""
        pairs = (part.partition("=") for part in self.base_models.split(",") if part)
        return {name: source or name for name, _, source in pairs}


def urls_of(text: str) -> tuple[str, ...]:
    """Of several servers, named by comma."""
    return tuple(text.split(","))


def external_hosts() -> frozenset[str]:
    """Where `external` environments may connect to, also in child processes of a host."""
    return frozenset(filter(None, os.environ.get("VLA_EXTERNAL_HOSTS", "").split(",")))


@functools.cache
def load_settings() -> Settings:
    """Read the environment. Raises `ConfigurationError` naming each missing or wrong variable."""
    values = {
        name: os.environ[variable]
        for name in Settings.model_fields
        if (variable := f"VLA_{name.upper()}") in os.environ
    }
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"VLA_{str(item['loc'][0]).upper()}: {item['msg']}" for item in error.errors()
        )
        raise ConfigurationError(f"{problems}. `vla up` sets these for a local stack.") from error
