"""A Harbor task's directory, and the surroundings that its files come to."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.coding.sets.dockerfile import NeedsImageError, Recipe, read_dockerfile
from asyncrl.coding.sets.harbor_config import AgentTable, EnvironmentTable, megabytes, resolved
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.task_files import TaskFiles, read_text, read_tree
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxLimits

_MAX_PIDS = 256
_MAX_INODES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborSource:
    """The task's directory, and who asks for it."""

    root: Path
    task_id: str
    settings: HarborSettings

    def text(self, path: str) -> str:
        return read_text(self.root, path, task_id=self.task_id)

    def tree(self, folder: str) -> TaskFiles:
        ignore = []
        if (self.root / folder / ".harborignore").is_file():
            lines = self.text(f"{folder}/.harborignore").splitlines()
            ignore = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if any(line.startswith("!") for line in ignore):
                raise ConfigError(
                    f"{self.task_id}: {folder}/.harborignore: lines that begin with '!' are not understood"
                )
        return read_tree(self.root, folder, task_id=self.task_id, ignore=[*ignore, ".harborignore"])

    def has(self, path: str) -> bool:
        return os.path.lexists(self.root / path)

    def resolved(self, values: Mapping[str, str]) -> dict[str, str]:
        return resolved(values, task_id=self.task_id, host=os.environ, allowed=self.settings.host_variables)


def require_possible(source: HarborSource, environment: EnvironmentTable) -> None:
    if environment.os.lower() != "linux":
        raise ConfigError(f"{source.task_id}: it wants {environment.os}; sandboxes here are Linux")
    if environment.gpus or environment.tpu:
        raise ConfigError(f"{source.task_id}: it wants GPUs or TPUs inside its sandbox, which none has here")
    if environment.mcp_servers:
        raise ConfigError(f"{source.task_id}: it wants MCP servers, and nothing is reached from a sandbox here")


def surroundings(source: HarborSource, environment: EnvironmentTable, folder: str) -> tuple[Recipe, str]:
    """Return what the environment comes to, and its image where it needs one."""
    has_dockerfile = source.has(f"{folder}/Dockerfile")
    if environment.docker_image:
        if not source.settings.images:
            raise NeedsImageError(
                f"{source.task_id}: it needs the image {environment.docker_image}: set images = true with the sandbox "
                "backend 'container', or leave it out (skip_refused = true)"
            )
        recipe = Recipe(work="")
        if has_dockerfile:  # it tells the directory and the variables, which the image has; its files are in there
            found = re.findall(
                r"^\s*WORKDIR\s+(\S+)", source.text(f"{folder}/Dockerfile"), re.MULTILINE | re.IGNORECASE
            )
            recipe.work = posixpath.join("/", *found)
        return recipe, environment.docker_image
    if any(
        source.has(f"{folder}/{name}")
        for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
    ):
        raise NeedsImageError(f"{source.task_id}: it is made of several containers ({folder}/docker-compose.yaml)")
    if not has_dockerfile:
        raise ConfigError(
            f"{source.task_id}: neither {folder}/Dockerfile nor docker_image in task.toml says where it runs"
        )
    if source.has(f"{folder}/.dockerignore"):
        raise NeedsImageError(
            f"{source.task_id}: {folder}/.dockerignore is not understood; build it, and set docker_image"
        )
    try:
        recipe = read_dockerfile(
            source.text(f"{folder}/Dockerfile"),
            source.tree(folder),
            base_images=source.settings.base_images,
            provided=source.settings.tests_provided,
        )
    except NeedsImageError as error:
        raise NeedsImageError(
            f"{source.task_id}: it needs an image, since {error}: build it, and set docker_image in task.toml; or "
            "leave it out (skip_refused = true)"
        ) from None
    return recipe, ""


def work_of(source: HarborSource, environment: EnvironmentTable, recipe: Recipe, image: str) -> str:
    work = posixpath.normpath(environment.workdir or recipe.work or "/")
    if work == "/" or not work.startswith("/"):
        raise NeedsImageError(
            f"{source.task_id}: its working directory is {work!r}, and a sandbox's root is read-only: "
            + (f"say in workdir of [environment] where {image} works" if image else "it needs WORKDIR")
        )
    return work


def below(source: HarborSource, recipe: Recipe, work: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the recipe's files by their paths in the working directory, and which of them may be run."""
    prefix = work.rstrip("/") + "/"
    outside = [path for path in recipe.files if not path.startswith(prefix)]
    if outside:
        raise NeedsImageError(
            f"{source.task_id}: it needs an image, since it copies to {outside[0]}, outside its directory {work}"
        )
    for path in recipe.directories:
        if not (work + "/").startswith(path + "/") and not path.startswith((prefix, "/tmp", "/tests", "/logs")):
            raise NeedsImageError(
                f"{source.task_id}: it needs an image, since it makes {path}, outside its directory {work}"
            )
    files = {path.removeprefix(prefix): data for path, data in recipe.files.items()}
    return files, tuple(path.removeprefix(prefix) for path in recipe.executable if path in recipe.files)


def limits_of(source: HarborSource, environment: EnvironmentTable, agent: AgentTable) -> SandboxLimits:
    settings = source.settings
    task_id = source.task_id
    memory = environment.memory_mb or (megabytes(environment.memory, task_id=task_id) if environment.memory else 2048)
    storage = environment.storage_mb or (
        megabytes(environment.storage, task_id=task_id) if environment.storage else 10240
    )
    wall_s = settings.agent_timeout_s(agent.timeout_sec) or settings.command_s
    return SandboxLimits(
        wall_s=wall_s,
        cpu_s=wall_s,
        memory_bytes=min(memory, settings.max_memory_mb) * 2**20,
        disk_bytes=min(storage, settings.max_storage_mb) * 2**20,
        max_pids=_MAX_PIDS,
        max_files=_MAX_INODES,
    )
