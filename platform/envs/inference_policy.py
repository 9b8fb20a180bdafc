"""The policy of a rollout: it draws from the inference workers, and keeps what RL needs.

Features that a prediction computed are taken out of the payload store at once and travel with the
decision (encode once).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.client.inference import InferenceProxy
from vla_platform.envs.base import Observation
from vla_platform.envs.policies import Predicted
from vla_storage.payloads import PayloadStore


class InferencePolicy:
    """Thread-safe. `sample=False` acts by the mean, as evaluations do."""

    def __init__(
        self,
        proxy: InferenceProxy,
        *,
        payloads: PayloadStore | None = None,
        sample: bool = True,
        with_values: bool = False,
        with_features: bool = False,
    ) -> None:
        self._proxy = proxy
        self._payloads = payloads
        self._options = {
            "sample": sample,
            "return_log_probs": sample,
            "return_values": sample and with_values,
            "return_features": sample and with_features and payloads is not None,
        }

    def predict(
        self,
        observations: Sequence[Observation],
        *,
        policy_key: str,
        version: int | str | None,
        seed: int | None = None,
        timeout_s: float,
    ) -> Predicted:
        tenant, _, policy = policy_key.partition("/")
        found = self._proxy.predict(
            observations,
            tenant=tenant,
            policy=policy,
            version=version,
            seed=seed,
            timeout_s=timeout_s,
            **self._options,
        )
        return Predicted(
            actions=found.actions,
            policy_version=found.policy_version,
            module_digest=found.module_digest,
            log_prob=found.log_probs,
            value=found.values,
            latent=found.latents,
            features=self._features(tenant, found.features_key),
        )

    def _features(self, tenant: str, keys: str | None) -> list[npt.NDArray[Any]] | None:
        """Rows' features, (L, D) each, without padding; None where they are not kept.

        Raises `PayloadNotFoundError` where they are lost.
        """
        if keys is None or self._payloads is None:
            return None
        features: list[npt.NDArray[Any]] = []
        for key in keys.split(","):
            columns = self._payloads.arrays(key, tenant, ("feature", "length"), copy=True)
            self._payloads.clear(key, tenant)
            for feature, length in zip(columns["feature"], columns["length"], strict=True):
                features.append(np.ascontiguousarray(feature[len(feature) - int(length) :]))
        return features
