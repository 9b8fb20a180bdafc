"""Policies that were published without a run: a run's record, a checkpoint, the current version."""

from __future__ import annotations

from vla_platform.control.ledger import Ledger
from vla_platform.control.prepared import Prepared, prepared_key
from vla_platform.gpu_workers.slot_state import SlotConfig
from vla_platform.gpu_workers.weights import Weights
from vla_storage.checkpoints import Checkpoint, CheckpointHeader, CheckpointStore
from vla_storage.manifests import Lineage

RUN = "sft-published"


def publish(store: CheckpointStore, ledger: Ledger, config: SlotConfig, weights: Weights) -> str:
    """As version `weights.version` of `config`'s policy, whose tenant's `store` is. Returns the
    checkpoint's id."""
    prepared = Prepared(
        schema=config.schema, dataset_digest="d", train_episodes=(0,), heldout_episodes=(),
        num_samples=1, num_heldout=0, statistics={}, action_module=config.action_module,
        normalization=config.normalization,
    )  # fmt: skip
    store.objects.put(prepared_key(store.tenant_id, RUN), prepared.to_json())
    header = CheckpointHeader(
        policy=config.policy_key.partition("/")[2],
        workload_id=RUN,
        step=weights.version,
        policy_version=weights.version,
        position=weights.version,
        lineage=Lineage(
            spec_digest="s",
            dataset_digest="d",
            base_digest=config.schema.base_digest,
            schema_signature=config.schema.signature,
        ),
    )
    manifest = store.save(Checkpoint(header=header, module=weights.tensors, optimizer={}, state={}))
    ledger.publish_version(config.policy_key, weights.version, base_model=config.schema.base_model)
    return manifest.checkpoint_id
