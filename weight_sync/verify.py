"""Whether the bytes that are really there are the ones that were published, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.errors import WeightMismatch
from asyncrl.types import TensorEntry, WeightDelta, WeightManifest
from asyncrl.weight_sync.checksum import DIGESTS
from asyncrl.weight_sync.manifest import tensor_of


def verify(
    manifest: WeightManifest,
    data: Callable[[TensorEntry], memoryview],
    *,
    part: WeightDelta | None = None,
    source: str = "",
) -> tuple[str, ...]:
    """Return the digests of a version's tensors (or of its delta's parts), computed here, in the manifest's order.

    `data` gives the bytes of an entry, `source` says where they came from if not from the manifest's own file.
    Raises: WeightMismatch naming the first tensor whose digest is not the manifest's.
    """
    source = source or (part or manifest).location
    digest_of = DIGESTS[manifest.verification]
    found = []
    for entry in (part or manifest).tensors:
        digest = digest_of(data(entry))
        if digest != entry.digest:
            raise WeightMismatch(
                f"{entry.name} of version {manifest.version} has digest {digest}, the manifest says {entry.digest}: "
                f"the bytes that came from {source} are not the ones that were published",
                tensor=tensor_of(entry.name),
            )
        found.append(digest)
    return tuple(found)
