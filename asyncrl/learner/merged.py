"""A LoRA checkpoint made a whole model, in the engines' own arithmetic: W + scale * B A in float32, rounded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import CheckpointError
from asyncrl.types import TensorEntry, WeightManifest
from asyncrl.weight_sync.names import checkpoint_shapes
from asyncrl.weight_sync.weight_file import header_of, layout, write_weight_file

_CONFIG = "adapter_config.json"
_FACTORS = "adapter_model.safetensors"
_WEIGHTS = "model.safetensors"
_UNKNOWN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")


def is_adapter(directory: Path) -> bool:
    """Tell whether a directory holds an adapter in peft's form, and no model."""
    return (directory / _CONFIG).is_file()


def write_whole(adapter: Path, directory: Path) -> None:
    """Write the model that an adapter makes of the one that it names into a new `directory`, tensor by tensor.

    Raises: CheckpointError where that model is gone, or the adapter is of a kind that no run of asyncrl trains;
    WeightMismatch where it does not fit; WeightSyncError where there is no room.
    """
    from safetensors import safe_open

    from asyncrl.weight_sync.adapters import Merged, check_adapter  # torch, which nobody else here needs
    from asyncrl.weight_sync.sharded import bytes_of

    config = json.loads((adapter / _CONFIG).read_text(encoding="utf-8"))
    base = Path(config["base_model_name_or_path"])
    unknown = [name for name in _UNKNOWN if config.get(name)]
    if config.get("peft_type") != "LORA" or unknown:
        what = f"has {', '.join(unknown)}" if unknown else f"is of type {config.get('peft_type')}"
        raise CheckpointError(f"{adapter / _CONFIG} {what}, and only plain LoRA is merged here")
    if not base.is_dir():
        raise CheckpointError(f"{adapter / _CONFIG} is an adapter of {base}, where there is no model any more")
    manifest = _manifest(adapter / _FACTORS, float(config["lora_alpha"]) / int(config["r"]))
    check_adapter(manifest, checkpoint_shapes(base))
    directory.mkdir()
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, directory / path.name)
    dtypes = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in _headers(base)}
    with safe_open(adapter / _FACTORS, "pt") as factors:
        merged = Merged(base, manifest, lambda entry: factors.get_tensor(entry.name))
        write_weight_file(
            directory / _WEIGHTS,
            layout(((name, *dtypes[name]) for name in merged.names), aligned=False),
            (bytes_of(tensor) for _, tensor in merged.tensors()),
            metadata={"format": "pt"},
            durable=False,
            digest=lambda data: "",
        )


def _manifest(path: Path, scale: float) -> WeightManifest:
    entries = [
        TensorEntry(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]), offset=0, num_bytes=0, digest="")
        for name, entry in header_of(path).items()
    ]
    return WeightManifest(
        run_id="",
        version=0,
        transport="filesystem",
        location=str(path),
        tensors=tuple(entries),
        digest="",
        adapter_scale=scale,
    )


def _headers(base: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(base.glob("*.safetensors")):
        yield from header_of(file).items()
