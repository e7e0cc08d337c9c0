"""What `asyncrl launch` writes can be run: it is parsed, and a batch file carried out by stand-ins of a cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from asyncrl import cli
from asyncrl.configs import load_config
from asyncrl.configs.loader import apply_overrides

ROLES = {"listen": "0.0.0.0:8780", "token_file": "token", "engines": 2, "environments": 1}


def write(directory: Path, roles: bool = True, **changes: Any) -> Path:
    """Write a configuration with roles below `directory`, all of whose paths lie on a shared disk."""
    tables = {
        "model": {"path": "/mnt/shared/model"},
        "environment": {"name": "bugfix"},
        "run": {"name": "My run", "directory": "/mnt/shared/runs/a run"},
        "weight_sync": {"transport": "filesystem", "directory": "/mnt/shared/weights"},
        "roles": ROLES if roles else {},
    }
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in changes.items()]
    path = directory / "cluster.toml"
    path.write_text(tomli_w.dumps(apply_overrides(tables, overrides)), encoding="utf-8")
    return path


def launch(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["launch", *arguments]) == 0
    return capsys.readouterr().out


def parses(argv: list[str]) -> None:
    """Fail unless a command is one that asyncrl takes."""
    assert argv[0] == "asyncrl"
    cli._parser().parse_args(argv[1:])


def test_each_host_gets_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    said = launch(str(path), "--print", "--hosts", "train,gpu-0,gpu-1,cpu", "--set", "run.seed=7", capsys=capsys)
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in said.split("# ")[1:]}
    assert list(blocks) == ["train", "gpu-0", "gpu-1", "cpu"]
    (orchestrator,) = blocks["train"]
    assert shlex.split(orchestrator) == ["asyncrl", "orchestrator", str(path), "--set", "run.seed=7"]
    for host, words in {
        "gpu-0": "asyncrl engine --connect train:8780 --token-file token --name engine-0",
        "gpu-1": "asyncrl engine --connect train:8780 --token-file token --name engine-1",
        "cpu": "asyncrl environment --connect train:8780 --token-file token --name environment-0",
    }.items():
        assert blocks[host] == [words]
    for lines in blocks.values():
        for line in lines:
            parses(shlex.split(line))


def test_roles_share_hosts_where_there_are_fewer_and_trust_the_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, roles__tls_certificate="cert.pem", roles__listen="10.0.0.1:8780")
    said = launch(str(path), "--print", "--hosts", "a,b", capsys=capsys)
    assert said.count("--connect 10.0.0.1:8780") == 3
    assert said.count("--tls-ca cert.pem") == 3
    assert said.index("# b") < said.index("asyncrl engine")


def test_a_batch_file_starts_every_role_on_its_node_and_ends_with_the_orchestrator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, script = write(tmp_path), tmp_path / "run.sbatch"
    launch(str(path), "--slurm", str(script), capsys=capsys)
    text = script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    directives = dict(line[8:].split("=", 1) for line in text.splitlines() if line.startswith("#SBATCH "))
    assert directives["--nodes"] == "4"
    assert directives["--ntasks-per-node"] == "1"
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    programs = {
        "scontrol": 'printf "%s\\n" node-a node-b node-c node-d',
        "srun": 'for word; do case $word in --nodelist=*) node=${word#*=};; -*) ;; *) break;; esac; shift; done\n'
        f'printf "%s|" "$node" "$@" >> {shlex.quote(str(tmp_path))}/"$node"\n[ "$2" != orchestrator ] || exit 3',
    }  # fmt: skip
    for name, program in programs.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{program}\n")
        (stand_ins / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[a-d]"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr  # the orchestrator's
    ran = {node: (tmp_path / node).read_text().split("|")[1:-1] for node in ("node-a", "node-b", "node-c", "node-d")}
    assert ran["node-a"] == ["asyncrl", "orchestrator", str(path)]
    assert ran["node-c"][:4] == ["asyncrl", "engine", "--connect", "node-a:8780"]
    assert ran["node-d"][-1] == "environment-0"
    for argv in ran.values():
        parses(argv)


def test_a_requeued_job_goes_on_with_the_run_that_it_had_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sbatch"
    launch(str(write(tmp_path)), "--slurm", str(script), capsys=capsys)
    assert "if [ -e '/mnt/shared/runs/a run/config.toml' ]; then resume=(--resume); fi" in script.read_text()
    (line,) = [line for line in script.read_text().splitlines() if " orchestrator " in line]
    assert line.endswith('"${resume[@]}"')


def test_manifests_hold_what_kubernetes_requires_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path), tmp_path / "run.yaml"
    launch(str(path), "--kubernetes", str(out), "--image", "asyncrl:1", "--gpus", "2", capsys=capsys)
    objects = list(yaml.safe_load_all(out.read_text()))
    kinds = [(thing["apiVersion"], thing["kind"], thing["metadata"]["name"]) for thing in objects]
    assert kinds == [
        ("v1", "ConfigMap", "asyncrl-my-run"),
        ("v1", "Service", "asyncrl-my-run"),
        ("batch/v1", "Job", "asyncrl-my-run-orchestrator"),
        ("batch/v1", "Job", "asyncrl-my-run-engine"),
        ("batch/v1", "Job", "asyncrl-my-run-environment"),
    ]
    config, service, *jobs = objects
    (tmp_path / "mounted.toml").write_text(config["data"]["config.toml"])
    assert load_config(tmp_path / "mounted.toml") == load_config(path)
    assert service["spec"]["ports"] == [{"port": 8780}]
    assert service["spec"]["selector"] == jobs[0]["spec"]["template"]["metadata"]["labels"]
    for job in jobs:
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert pod["restartPolicy"] == "OnFailure"
        (container,) = pod["containers"]
        assert {"name", "image", "command", "volumeMounts"} <= set(container)
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    engine = jobs[1]["spec"]
    assert (engine["completions"], engine["parallelism"]) == (2, 2)
    (container,) = engine["template"]["spec"]["containers"]
    assert container["command"][-1] == "engine-$(ROLE_NUMBER)"
    assert container["env"][0]["name"] == "ROLE_NUMBER"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    parses([word.replace("$(ROLE_NUMBER)", "1") for word in container["command"]])
    assert container["command"][3] == "asyncrl-my-run:8780"
    (container,) = jobs[0]["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container
    shell = container["command"][-1]
    assert subprocess.run(["sh", "-n", "-c", shell], check=False).returncode == 0
    parses(shlex.split(shell.partition("exec ")[2].replace('"$@"', "")))


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, [], "say what to write: --print, --slurm FILE or --kubernetes FILE"),
        ({"roles": False}, ["--print"], "no role is asked for"),
        ({"roles__listen": "0.0.0.0:0"}, ["--print"], "listen must name a port that roles can be told, got 0"),
        ({}, ["--kubernetes", "run.yaml"], "--kubernetes needs --image"),
        (
            {"model__path": "models/mine"},
            ["--kubernetes", "run.yaml", "--image", "a"],
            "path ([model]) must lie below /mnt/shared, which all pods mount (--shared), got 'models/mine'",
        ),
        ({}, ["--slurm", "/gone/run.sbatch"], "cannot write /gone/run.sbatch: No such file or directory"),
    ],
)
def test_what_cannot_be_launched_is_named(
    changes: dict[str, Any], arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", str(write(tmp_path, **changes)), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("weight_sync.transport=shared_memory", 'transport = "shared_memory" ([weight_sync]) does not leave the host'),
        ("engine.count=2", "leave urls, count and devices out ([engine])"),
        ("roles.sandboxes=1", "set one of them to 0 ([roles])"),
        ("roles.learner=true", ""),
    ],
)
def test_roles_that_contradict_the_rest_of_a_configuration_are_refused(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", str(write(tmp_path)), "--print", "--set", override]) == (2 if words else 0)
    assert words in capsys.readouterr().err


def test_an_orchestrator_without_roles_is_told_apart_from_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["orchestrator", str(write(tmp_path, roles=False))]) == 2
    assert "with all on this host it is asyncrl train" in capsys.readouterr().err
