"""What a run asks of a Ray cluster, and what is refused before anything is started. No Ray runs here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_run import write_config

from asyncrl import cli
from asyncrl.configs import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.on_ray.bundles import Bundle, bundles_of, check_cluster, resolved
from asyncrl.ray_settings import RaySettings, RoleResources, Strategy

_FILES = {"weight_sync.transport": "filesystem", "weight_sync.directory": "/shared/weights"}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Return what loads a configuration with some settings put over those of a run that may be on Ray."""

    def load(settings: Mapping[str, Any]) -> Config:
        return load_config(write_config(tmp_path / "tiny.toml", tmp_path, {**_FILES, **settings}))

    return load


def test_each_process_takes_one_bundle_and_an_engine_as_much_as_it_has_workers(load: Any) -> None:
    config = load(
        {
            "learner.ranks": 2,
            "engine.count": 2,
            "engine.extra": {"tensor-parallel-size": 4},
            "ray.environments": 1,
            "ray.learner": {"gpus": 1.0, "memory_gib": 2.0},
            "ray.engine": {"cpus": 0.5, "gpus": 1.0, "resources": {"fast": 1.0}},
        }
    )
    assert [(bundle.name, bundle.amounts) for bundle in bundles_of(config)] == [
        ("learner 0", {"CPU": 1.0, "GPU": 1.0, "memory": 2.0 * 2**30}),
        ("learner 1", {"CPU": 1.0, "GPU": 1.0, "memory": 2.0 * 2**30}),
        ("engine 0", {"CPU": 2.0, "GPU": 4.0, "fast": 4.0}),
        ("engine 1", {"CPU": 2.0, "GPU": 4.0, "fast": 4.0}),
        ("environment 0", {"CPU": 1.0}),
    ]


def test_what_runs_elsewhere_or_not_at_all_takes_nothing(load: Any) -> None:
    named = load({"engine.urls": ["http://a:1"]})
    assert [bundle.name for bundle in bundles_of(named)] == ["learner 0"]
    assert [bundle.name for bundle in bundles_of(load({"ray.sandboxes": 2}))][2:] == ["sandbox 0", "sandbox 1"]


def test_threads_are_those_that_ray_gives_unless_they_are_set(load: Any) -> None:
    config = resolved(load({"ray.engine": {"cpus": 4.0}, "ray.learner": {"cpus": 0.5}, "learner.threads": 0}))
    assert (config.engine.threads, config.learner.threads) == (4, 1)
    assert resolved(load({"engine.threads": 3})).engine.threads == 3


def test_paths_hold_in_any_nodes_working_directory(load: Any) -> None:
    given = load({"model.path": "models/a", "weight_sync.directory": "weights"})
    config = resolved(given)
    assert config.model.path == Path("models/a").absolute()
    assert config.weight_sync.directory == Path("weights").absolute()
    assert (config.run.directory, config.warm_start.path) == (given.run.directory, given.warm_start.path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight_sync.transport": "shared_memory", "weight_sync.directory": ""}, "transport = 'shared_memory'.*edge"),
        ({"learner.start": "by_hand"}, r"start = 'by_hand' \(\[learner\]\) and --on ray exclude each other"),
        ({"roles.engines": 1, "roles.listen": "127.0.0.1:0", "roles.token_file": "t"}, r"\[roles\] that other hosts"),
        ({"engine.devices": ["0"]}, r"devices must be empty on Ray, which gives them out, got \['0'\] \(\[engine\]\)"),
        ({"engine.port": 8000}, r"port must be 0 on Ray.*got 8000 \(\[engine\]\)"),
        (
            {"ray.sandboxes": 1, "sandbox.backend": "remote", "sandbox.urls": ["http://a:1"]},
            r"sandboxes = 1 \(\[ray\]\) are servers, and backend = 'remote'",
        ),
        (
            {"engine.extra": {"tensor_parallel_size": "two"}},
            "tensor_parallel_size must be a whole number >= 1, got 'tw",
        ),
    ],
)
def test_what_only_makes_sense_on_one_machine_is_refused(load: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bundles_of(load(settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"address": ""}, r"address must be \"auto\""),
        ({"sandboxes": -1}, r"sandboxes must be from 0 to 4096, got -1 \(\[ray\]\)"),
        ({"sandboxes": 1, "environments": 2}, r"sandboxes must be 0 where environments = 2, got 1 \(\[ray\]\)"),
        ({"start_timeout_s": 0.0}, r"start_timeout_s must be > 0 and finite seconds, got 0\.0 \(\[ray\]\)"),
        ({"engine": RoleResources(cpus=-1.0)}, r"cpus must be >= 0 and finite, got -1\.0 \(\[ray\.engine\]\)"),
        ({"learner": RoleResources(gpus=1.5)}, r"gpus must be whole where it is above 1.*1\.5 \(\[ray\.learner\]\)"),
        ({"sandbox": RoleResources(cpus=0.0)}, r"something must be asked for.*\(\[ray\.sandbox\]\)"),
        (
            {"environment": RoleResources(resources={"GPU": 1.0})},
            r"resources may not name GPU \(\[ray\.environment\]\): set cpus, gpus or memory_gib",
        ),
    ],
)
def test_a_setting_that_ray_could_not_take_is_refused_with_its_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RaySettings(**settings)


_BUNDLES = (
    Bundle(role="learner", index=0, amounts={"CPU": 2.0, "GPU": 1.0}),
    Bundle(role="engine", index=0, amounts={"CPU": 1.0, "GPU": 2.0}),
    Bundle(role="engine", index=1, amounts={"CPU": 1.0, "GPU": 2.0}),
)
_ENOUGH = {"CPU": 8.0, "GPU": 3.0}


def _check(*nodes: Mapping[str, float], free: Mapping[str, float] | None = None, strategy: str = "PACK") -> str:
    """Return what is said of a cluster; empty where it has all."""
    total = {name: sum(node.get(name, 0.0) for node in nodes) for node in nodes for name in node}
    try:
        check_cluster(_BUNDLES, RaySettings(strategy=Strategy(strategy)), nodes, total if free is None else free)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_cluster_with_exactly_what_is_asked_for_does() -> None:
    assert _check({"CPU": 2.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 3.0}) == ""
    assert _check({"CPU": 4.0, "GPU": 5.0}, strategy="STRICT_PACK") == ""
    assert _check(_ENOUGH, _ENOUGH, _ENOUGH, strategy="STRICT_SPREAD") == ""


def test_every_resource_that_is_short_is_named_with_who_asks_and_what_there_is() -> None:
    assert _check({"CPU": 3.0, "GPU": 2.0}) == (
        "the Ray cluster 'auto' has not what is asked for ([ray]): "
        "CPU: 4 asked for by 1 learner (2 each, cpus in [ray.learner]) and 2 engines (1 each, cpus in [ray.engine]), "
        "there is 3 on 1 nodes, 3 of it free; "
        "GPU: 5 asked for by 1 learner (1 each, gpus in [ray.learner]) and 2 engines (2 each, gpus in [ray.engine]), "
        "there is 2 on 1 nodes, 2 of it free"
    )
    assert "GPU: 5 asked for" in _check({"CPU": 64.0})
    assert _check({"CPU": 64.0}).endswith("there is 0 on 1 nodes")


def test_what_others_have_taken_is_not_there() -> None:
    assert "GPU: 5 asked for" in (said := _check(_ENOUGH, _ENOUGH, free={"CPU": 16.0, "GPU": 4.0}))
    assert said.endswith("there is 6 on 2 nodes, 4 of it free")


def test_what_no_node_has_in_one_piece_is_named() -> None:
    nodes = [{"CPU": 1.0, "GPU": 1.0}] * 6
    assert _check(*nodes).endswith(
        "CPU: no node has what learner 0 needs, the largest 1; "
        "GPU: no node has what engine 0, engine 1 needs, the largest 1"
    )


def test_a_strict_strategy_that_the_nodes_do_not_allow_is_refused() -> None:
    assert "nodes: 3 asked for by strategy = 'STRICT_SPREAD', one for each process, of 2" in _check(
        _ENOUGH, _ENOUGH, strategy="STRICT_SPREAD"
    )
    assert "a node with CPU 4, GPU 5: strategy = 'STRICT_PACK'" in _check(_ENOUGH, _ENOUGH, strategy="STRICT_PACK")


def test_check_says_what_would_be_taken_without_asking_a_cluster(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load({"learner.start": "by_hand"})
    assert cli.main(["check", str(tmp_path / "tiny.toml"), "--on", "ray"]) == 2
    assert "start = 'by_hand' ([learner]) and --on ray exclude each other" in capsys.readouterr().err


@pytest.mark.slow
def test_ray_that_is_not_installed_is_asked_for_by_the_extras_name_and_no_other_run_needs_it(
    tmp_path: Path, load: Any
) -> None:
    load({})
    code = "import sys; sys.modules['ray'] = None\nfrom asyncrl import cli; sys.exit(cli.main(sys.argv[1:]))"
    for verb, code_is, words in (
        ("check", 2, "there is no model directory|holds no config.json"),
        ("train", 2, r"--on ray needs Ray, which is not installed: pip install asyncrl\[ray\]"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, verb, str(tmp_path / "tiny.toml"), "--on", "ray"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code_is
        assert re.search(words, done.stderr), done.stderr
