"""New weights into the engine: bucket by bucket, with a version and digests taken on both sides (law 5)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from spmdrl.policy.contract import Bucket, Policy
from spmdrl.policy.weights import shard_digests, word_sum
from spmdrl.rollout.engine import Engine


class CorruptWeightsError(RuntimeError):
    """What arrived is not what was sent."""


@dataclass
class PushReport:
    """Bytes of weights an engine took and the version they made."""

    version: int
    bytes: int
    deep: bool
    """True when the engine's own memory was compared too."""


def verified(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, once each shard's digest equals the one its owner took before sending.

    Raises:
        CorruptWeightsError: names the tensor and the shard.
    """
    for name, tensor in bucket.tensors.items():
        sent = bucket.digests[name]
        got = shard_digests(tensor, len(sent))
        wrong = torch.nonzero(sent.cpu() != got.cpu()).flatten().tolist()
        if wrong:
            raise CorruptWeightsError(
                f"weights changed on their way to the engine: {name}, shard(s) {wrong}; "
                "the engine keeps no version and will not sample"
            )
    return bucket.tensors


def push(policy: Policy, engine: Engine, dtype: torch.dtype, bucket_bytes: int) -> PushReport:
    """Bring the engine to the policy's version. Collective.

    Raises:
        CorruptWeightsError: digests differ, or the engine's memory does not hold what was pushed.
    """
    size, sent_words = 0, 0
    deep = engine.held_words() is not None

    def counted(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        nonlocal size, sent_words
        for bucket in buckets:
            size += sum(t.numel() * t.element_size() for t in bucket.tensors.values())
            if deep:
                sent_words += word_sum(bucket.tensors.values())
            yield bucket

    engine.load(counted(policy.weights(bucket_bytes, dtype)), policy.version)
    if deep and engine.held_words() != sent_words % (1 << 64):
        engine.version = None
        raise CorruptWeightsError(f"the engine's memory does not hold version {policy.version} after the push")
    return PushReport(policy.version, size, deep)
