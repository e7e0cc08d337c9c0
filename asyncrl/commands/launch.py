"""Write the commands that start a run and its roles, for each host, for SLURM or for Kubernetes. Starts nothing.

  asyncrl launch cluster.toml --print
  asyncrl launch cluster.toml --print --hosts train-0,gpu-0,gpu-1,cpu-0
  asyncrl launch cluster.toml --slurm run.sbatch
  asyncrl launch cluster.toml --kubernetes run.yaml --image registry.example/asyncrl:1

The configuration's [roles] says how many engines, environments, sandboxes and learners there are. The first host is the
orchestrator's; the others get a role each, in turn where there are fewer of them than roles. All need asyncrl in the
same version, the token's file, the model, and the directory of [weight_sync].

`--slurm` asks for a node a host; what else your cluster wants (partition, GPUs, time) goes to sbatch's own command
line. A job that is requeued goes on from its run directory, where [run] directory names one.

`--kubernetes` writes a Service, a ConfigMap with the configuration as resolved, and a Job for each kind of role. It
expects a Secret `asyncrl-token` with the key `token`, and a claim `asyncrl-shared` that all pods mount at --shared:
the model, [weight_sync] directory and [run] directory must lie below it. Sandboxes need user namespaces in their pods.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, dump_config, load_config
from asyncrl.errors import ConfigError
from asyncrl.roles.settings import split_address

HELP = "write the commands that start a run on several hosts"

_ANYWHERE = ("0.0.0.0", "")
_MOUNTED_CONFIG, _MOUNTED_TOKEN = "/etc/asyncrl", "/etc/asyncrl-token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One command, and the number of the host that it is for."""

    host: int
    kind: str
    argv: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser)
    parser.add_argument("--print", action="store_true", help="print the command of each host")
    parser.add_argument("--hosts", default="", metavar="HOST,HOST,...", help="default: host-0,host-1,...: one for each")
    parser.add_argument("--slurm", type=Path, metavar="FILE", help="write a batch file for sbatch")
    parser.add_argument("--kubernetes", type=Path, metavar="FILE", help="write manifests for kubectl apply -f")
    parser.add_argument("--image", default="", metavar="IMAGE", help="of the pods: with asyncrl installed")
    parser.add_argument(
        "--shared", type=Path, default=Path("/mnt/shared"), metavar="DIR", help="of the pods (/mnt/shared)"
    )
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="of each engine's and learner's pod (0)")
    parser.add_argument(
        "--tls-ca", default="", metavar="FILE", help="of the roles; default: [roles] tls_certificate, where it is set"
    )


def main(arguments: argparse.Namespace) -> int:
    """Write; return the exit code."""
    config = load_config(arguments.config, arguments.set)
    _check(arguments, config)
    hosts = [host.strip() for host in arguments.hosts.split(",") if host.strip()]
    hosts = hosts or [f"host-{number}" for number in range(1 + sum(config.roles.wanted.values()))]
    if arguments.print:
        tasks = tasks_of(arguments, config, num_hosts=len(hosts), address=_address(config, hosts[0]))
        for number, host in enumerate(hosts):
            print(f"# {host}")
            for task in tasks:
                if task.host == number:
                    print(shlex.join(task.argv))
    if arguments.slurm:
        tasks = tasks_of(arguments, config, num_hosts=len(hosts), address="$orchestrator")
        _write(arguments.slurm, slurm_script(config, tasks, num_nodes=len(hosts)))
    if arguments.kubernetes:
        manifests = kubernetes_manifests(arguments, config)
        _write(arguments.kubernetes, yaml.safe_dump_all(manifests, sort_keys=False, width=1000))
    return 0


def _check(arguments: argparse.Namespace, config: Config) -> None:
    if not config.roles.wanted:
        raise ConfigError("no role is asked for: set engines, say, and listen ([roles])")
    if not split_address(config.roles.listen, "listen ([roles])")[1]:
        raise ConfigError("listen must name a port that roles can be told, got 0 ([roles])")
    if not (arguments.print or arguments.slurm or arguments.kubernetes):
        raise ConfigError("say what to write: --print, --slurm FILE or --kubernetes FILE")
    if not arguments.kubernetes:
        return
    if not arguments.image:
        raise ConfigError("--kubernetes needs --image: what the pods run")
    needed = {"path ([model])": config.model.path, "directory ([run])": config.run.directory}
    if config.weight_sync.transport == "filesystem":
        needed["directory ([weight_sync])"] = config.weight_sync.directory
    for name, path in needed.items():
        if not path.is_relative_to(arguments.shared):
            raise ConfigError(
                f"{name} must lie below {arguments.shared}, which all pods mount (--shared), got '{path}'"
            )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}")


def _address(config: Config, host: str) -> str:
    listen, port = split_address(config.roles.listen, "listen ([roles])")
    return f"{host if listen in _ANYWHERE else listen}:{port}"


def tasks_of(arguments: argparse.Namespace, config: Config, *, num_hosts: int, address: str) -> list[Task]:
    """Return the commands of a run whose orchestrator is at `address`, its own first."""
    overrides = [word for override in arguments.set for word in ("--set", override)]
    tasks = [Task(host=0, kind="orchestrator", argv=["asyncrl", "orchestrator", str(arguments.config), *overrides])]
    others = range(1, num_hosts) or [0]
    for kind, count in config.roles.wanted.items():
        for number in range(count):
            argv = [*role_command(arguments, config, kind, address), "--name", f"{kind}-{number}"]
            tasks.append(Task(host=others[(len(tasks) - 1) % len(others)], kind=kind, argv=argv))
    return tasks


def role_command(arguments: argparse.Namespace, config: Config, kind: str, address: str, token: str = "") -> list[str]:
    """Return a role's command, without its name."""
    argv = ["asyncrl", kind, "--connect", address]
    if token := token or config.roles.token_file:
        argv += ["--token-file", token]
    if trusted := arguments.tls_ca or config.roles.tls_certificate:
        argv += ["--tls-ca", trusted]
    return argv


# --- SLURM ------------------------------------------------------------------------------------------------------------


def slurm_script(config: Config, tasks: list[Task], *, num_nodes: int) -> str:
    """Return a batch file: each host's commands as steps of one job, which ends with the orchestrator."""
    directory, port = config.run.directory, split_address(config.roles.listen, "listen ([roles])")[1]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_name(config)}",
        f"#SBATCH --nodes={num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --output={_name(config)}-%j.log",
        "set -euo pipefail",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'orchestrator="${{hosts[0]}}:{port}"',
        "",
        "# step NUMBER COMMAND...: on the node of that number, beside the other steps",
        'step() { srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[$1]}" "${@:2}" & }',
        "",
        "resume=()",
    ]
    if directory != Path(""):
        lines.append(f"if [ -e {shlex.quote(str(directory / 'config.toml'))} ]; then resume=(--resume); fi")
    for task in tasks:
        words = " ".join('"$orchestrator"' if word == "$orchestrator" else shlex.quote(word) for word in task.argv)
        more = ' "${resume[@]}"' if task.kind == "orchestrator" else ""
        lines.append(f"step {task.host} {words}{more}")
        if task.kind == "orchestrator":
            lines.append("run=$!")
    lines += [
        "",
        "code=0",
        'wait "$run" || code=$?',
        "wait  # for the roles, which the run has let go",
        "exit $code",
        "",
    ]
    return "\n".join(lines)


def _name(config: Config) -> str:
    return "asyncrl-" + (re.sub("[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:40] or "run")


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def kubernetes_manifests(arguments: argparse.Namespace, config: Config) -> list[dict[str, Any]]:
    """Return a Service, a ConfigMap and Jobs, whose pods are restarted where they fail and keep their names."""
    name, port = _name(config), split_address(config.roles.listen, "listen ([roles])")[1]
    token = f"{_MOUNTED_TOKEN}/token"
    orchestrator = [
        *("asyncrl", "orchestrator", f"{_MOUNTED_CONFIG}/config.toml"),
        *("--set", f"roles.listen=0.0.0.0:{port}", "--set", f"roles.token_file={token}"),
    ]
    # a pod that is started again finds the run that it had begun
    resuming = f"if [ -e {shlex.quote(str(config.run.directory / 'config.toml'))} ]; then set -- --resume; fi; "
    command = ["/bin/sh", "-c", f'{resuming}exec {shlex.join(orchestrator)} "$@"']
    manifests = [
        _object("v1", "ConfigMap", name, data={"config.toml": dump_config(config)}),
        _object("v1", "Service", name, spec={"selector": {"role": f"{name}-orchestrator"}, "ports": [{"port": port}]}),
        _job(arguments, f"{name}-orchestrator", command, config_map=name, count=1, gpus=0),
    ]
    for kind, count in config.roles.wanted.items():
        command = [*role_command(arguments, config, kind, f"{name}:{port}", token), "--name", f"{kind}-$(ROLE_NUMBER)"]
        gpus = arguments.gpus if kind in ("engine", "learner") else 0
        manifests.append(_job(arguments, f"{name}-{kind}", command, config_map=name, count=count, gpus=gpus))
    return manifests


def _object(version: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": {"app": name}}, **rest}


def _job(
    arguments: argparse.Namespace, name: str, command: list[str], *, config_map: str, count: int, gpus: int
) -> dict[str, Any]:
    number = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container: dict[str, Any] = {
        "name": "asyncrl",
        "image": arguments.image,
        "command": command,
        "env": [{"name": "ROLE_NUMBER", "valueFrom": number}],
        "volumeMounts": [
            {"name": "shared", "mountPath": str(arguments.shared)},
            {"name": "config", "mountPath": _MOUNTED_CONFIG, "readOnly": True},
            {"name": "token", "mountPath": _MOUNTED_TOKEN, "readOnly": True},
        ],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    pod = {
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "asyncrl-shared"}},
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "token", "secret": {"secretName": "asyncrl-token"}},
        ],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 6 * count,
        "template": {"metadata": {"labels": {"role": name}}, "spec": pod},
    }
    return _object("batch/v1", "Job", name, spec=spec)
