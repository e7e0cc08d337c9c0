"""The whole configuration, from TOML files; each part's settings are defined beside the part."""

if __name__ == "configs":
    raise ImportError("import this package as asyncrl.configs")

from asyncrl.configs.loader import apply_overrides, build, read_toml, to_table
from asyncrl.configs.schema import (
    Config,
    EvaluationSettings,
    MetricsSettings,
    ModelSettings,
    RunSettings,
    at_home,
    differences,
    dump_config,
    load_config,
)

__all__ = [
    "Config",
    "EvaluationSettings",
    "MetricsSettings",
    "ModelSettings",
    "RunSettings",
    "apply_overrides",
    "at_home",
    "build",
    "differences",
    "dump_config",
    "load_config",
    "read_toml",
    "to_table",
]
