"""What a spec must agree with beyond itself: data, base model, checkpoints, environment.

Checked when a workload is submitted, before anything is written.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from vla_platform.control.prepared import Prepared, load_prepared
from vla_platform.control.services import Services
from vla_platform.datasets import LeRobotDataset, open_dataset
from vla_platform.datasets.locations import locate
from vla_platform.envs.harnesses import check_request
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.envs.suites import suite
from vla_platform.errors import SpecError, UnavailableError
from vla_platform.rl.graders import GRADERS
from vla_platform.rl.groups import SCORE_HOOKS, SHAPE_HOOKS, find_hook
from vla_platform.schema import Schema
from vla_platform.specs import (
    DatasetSpec,
    DistillationReward,
    GraderReward,
    RLSpec,
    SFTSpec,
    TeacherSpec,
    WorkloadSpec,
    nearest,
)
from vla_storage.manifests import Manifest


def check(services: Services, tenant: str, spec: WorkloadSpec) -> str:
    """The schema signature of a spec that can be run. Raises `SpecError`, `DatasetError`,
    `CheckpointNotFoundError`."""
    if spec.evaluation is not None:
        own = spec.evaluation
        suite(own.suite, episodes=own.episodes, seed=own.seed, options=own.options)
    if isinstance(spec, SFTSpec):
        dataset = open_for(services, tenant, spec.dataset)
        schema = derive_schema(services, spec, dataset)
        split_episodes(spec, dataset)
        if spec.init_from is not None:
            check_init(services, tenant, spec.init_from, schema)
        return schema.signature
    return check_rl(services, tenant, spec).schema.signature


def check_rl(services: Services, tenant: str, spec: RLSpec) -> Prepared:
    """The interface of the checkpoint that an RL run begins from."""
    if spec.environment is not None:
        request = EnvironmentRequest(env_id=spec.environment.id, options=spec.environment.options)
        check_request(request)
        most = services.settings.max_sessions_per_tenant
        if spec.rollout.num_envs > most:
            raise SpecError(
                f"rollout.num_envs {spec.rollout.num_envs} is above the {most} sessions that a "
                "host gives one tenant",
                problems=[{"field": "rollout.num_envs", "problem": f"at most {most}"}],
            )
    for hook in spec.score_hooks:
        find_hook(hook.name, SCORE_HOOKS)
    for hook in spec.shape_hooks:
        find_hook(hook.name, SHAPE_HOOKS)
    if isinstance(spec.reward, GraderReward):
        find_hook(spec.reward.name, GRADERS)
    base = served(services, spec.base_model)
    manifest = checkpoint_manifest(services, tenant, spec.init_from)
    prepared = load_prepared(services, tenant, manifest.workload_id)
    if prepared.schema.base_digest != base["digest"]:
        raise SpecError(
            f"init_from {spec.init_from} belongs to base model {prepared.schema.base_digest[:12]}; "
            f"{spec.base_model} is {str(base['digest'])[:12]}",
            problems=[{"field": "init_from", "value": spec.init_from, "problem": "other base"}],
        )
    if isinstance(spec.reward, DistillationReward):
        check_teacher(services, tenant, spec, spec.reward.teacher, prepared)
    return prepared


def check_teacher(
    services: Services, tenant: str, spec: RLSpec, teacher: TeacherSpec, student: Prepared
) -> None:
    """A teacher is a policy of the tenant that sees and does what the student does.

    Of a published version, whose record is not read here, the rest is checked where it scores.
    Raises `SpecError`, `NotFoundError`, `CheckpointNotFoundError`.
    """
    base_model = teacher.base_model or spec.base_model
    served(services, base_model)
    if isinstance(teacher.version, int):
        found = services.ledger.base_model_of(tenant, teacher.policy)
        problem = "" if found == base_model else f"it belongs to base model {found}"
    else:
        manifest = checkpoint_manifest(services, tenant, teacher.version)
        schema = load_prepared(services, tenant, manifest.workload_id).schema
        problem = student.schema.differs_beside_base(schema)
        if schema.base_model != base_model:
            problem = f"it belongs to base model {schema.base_model}"
        elif manifest.policy != teacher.policy:
            problem = f"it is a checkpoint of {manifest.policy}"
    if problem:
        raise SpecError(
            f"reward.teacher {teacher.policy} {teacher.version}: {problem}",
            problems=[{"field": "reward.teacher", "value": str(teacher.version),
                       "problem": problem}],
        )  # fmt: skip


def checkpoint_manifest(services: Services, tenant: str, checkpoint_id: str) -> Manifest:
    """Raises `CheckpointNotFoundError`, the same for another tenant's id as for one that never
    was (B20)."""
    store = services.checkpoints(tenant)
    return store.manifest(checkpoint_id)


def served(services: Services, base_model: str) -> dict[str, Any]:
    """Facts of a base model that some worker serves."""
    bases = services.ledger.base_models()
    base = bases.get(base_model)
    if base is None:
        if not bases:
            raise UnavailableError("no GPU worker has registered a base model yet; try again")
        hint = nearest(base_model, bases)
        raise SpecError(
            f"base_model {base_model!r} is not served; "
            f"{hint or 'served are ' + ', '.join(sorted(bases))}",
            problems=[{"field": "base_model", "value": base_model, "problem": "not served"}],
        )
    return base


def open_for(services: Services, tenant: str, spec: DatasetSpec) -> LeRobotDataset:
    settings = services.settings
    folder: Path = locate(
        spec.path,
        tenant=tenant,
        roots=settings.roots(),
        objects=services.objects,
        cache=settings.var / "cache" / "datasets",
    )
    return open_dataset(folder)


def derive_schema(services: Services, spec: SFTSpec, dataset: LeRobotDataset) -> Schema:
    """The interface that spec, dataset and base model have in common."""
    base = served(services, spec.base_model)
    asked = spec.dataset
    cameras = asked.cameras or tuple(sorted(dataset.cameras))
    for camera in cameras:
        dataset.feature(camera)
    if not cameras:
        raise SpecError("the dataset has no camera; a policy needs at least one", problems=[])
    uses_state = asked.state is not None and spec.action_module.state != "none"
    return Schema(
        base_model=spec.base_model,
        base_digest=str(base["digest"]),
        cameras=cameras,
        image_size=int(base["image_size"]),
        state_dim=prod(dataset.feature(asked.state).shape) if uses_state and asked.state else 0,
        action_dim=prod(dataset.feature(asked.action).shape),
        chunk=spec.action_module.chunk,
        action_module=spec.action_module.kind,
        state_input=spec.action_module.state if uses_state else "none",
    )


def check_init(services: Services, tenant: str, checkpoint_id: str, schema: Schema) -> None:
    """A run starts only from a checkpoint of its own tenant and interface (B20, B21).

    Raises `CheckpointNotFoundError`, the same for another tenant's id as for one that never was.
    """
    found = checkpoint_manifest(services, tenant, checkpoint_id).lineage.schema_signature
    if found != schema.signature:
        raise SpecError(
            f"init_from {checkpoint_id}: its schema is {found[:12]}, "
            f"this run's is {schema.signature[:12]}: other cameras, sizes, chunk or base",
            problems=[{"field": "init_from", "value": checkpoint_id, "problem": "other schema"}],
        )


def split_episodes(spec: SFTSpec, dataset: LeRobotDataset) -> tuple[list[int], list[int]]:
    """Training and held-out episodes; by default the last episode is held out."""
    every = [episode.index for episode in dataset.episodes]
    heldout = list(spec.dataset.heldout_episodes)
    if not heldout and spec.dataset.heldout_samples and len(every) > 1:
        free = [index for index in every if index not in (spec.dataset.episodes or ())]
        heldout = free[-1:]
    train = list(spec.dataset.episodes or [index for index in every if index not in heldout])
    for index in (*train, *heldout):
        dataset.episode(index)
    if not train:
        raise SpecError("no episode is left to train on", problems=[])
    return train, heldout
