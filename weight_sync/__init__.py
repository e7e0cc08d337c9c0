"""Weights from the learner into running engines: the manifest, the transports, and the plugin that vLLM loads.

Nothing here imports torch or vLLM at import time: vLLM loads `plugin` in every process it starts, and the
orchestrator reads manifests without torch.
"""

if __name__ == "weight_sync":
    raise ImportError("import this package as asyncrl.weight_sync")

from asyncrl.weight_sync.manifest import (
    MANIFEST_SUFFIX,
    combined_digest,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
    write_manifest,
)
from asyncrl.weight_sync.stale import remove_stale

TRANSPORTS = {
    "shared_memory": "asyncrl.weight_sync.shared_memory:SharedMemoryPublisher",
    "filesystem": "asyncrl.weight_sync.filesystem:FilesystemPublisher",
    "nccl": "asyncrl.weight_sync.nccl:NcclPublisher",
}
"""Name -> "module:Class" of the learner's half. Named and not imported, because the classes need torch."""

__all__ = [
    "MANIFEST_SUFFIX",
    "TRANSPORTS",
    "combined_digest",
    "manifest_from_json",
    "manifest_to_json",
    "read_manifest",
    "remove_stale",
    "write_manifest",
]
