"""The dashboards: configs/grafana holds what the code makes, and every query of it finds a real run's series."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_server import Prometheus, missing, needs_prometheus, serving
from tiny_model import build_tiny_model
from tiny_run import write_config
from tree import ROOT

from asyncrl import cli
from asyncrl.dashboards import BOARDS, Board, Chart, families_of, of_run
from asyncrl.dashboards.build import SPIKE, to_json

GRAFANA, PROMETHEUS = ROOT / "configs" / "grafana", ROOT / "configs" / "prometheus"
CHARTS = [(board, chart) for board in BOARDS for chart in board.charts]


def file_of(board: Board) -> Path:
    """Return where a dashboard lies."""
    return GRAFANA / f"{board.name}.json"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_files_are_what_the_code_makes(board: Board) -> None:
    assert file_of(board).read_text(encoding="utf-8") == to_json(board), (
        "run python -m asyncrl.dashboards.build configs/grafana"
    )


def test_there_is_a_file_for_every_dashboard_and_no_other() -> None:
    assert {path.name for path in GRAFANA.glob("*.json")} == {file_of(board).name for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_has_grafanas_form(board: Board) -> None:
    """Read by the SDK's types, which are generated from Grafana's schema, it loses nothing and gains nothing."""
    register_default_plugins()
    text = file_of(board).read_text(encoding="utf-8")
    read = Dashboard.from_json(json.loads(text))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == json.loads(text)
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    assert len(panels) == len(list(board.charts))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "two lie on each other"
    assert all(panel["description"] for panel in panels if "ALERTS" not in panel["targets"][0]["expr"])


def test_a_misspelt_field_is_found() -> None:
    """The mutant: a field that Grafana's schema does not have."""
    board = json.loads(file_of(BOARDS[0]).read_text(encoding="utf-8"))
    board["refreshh"] = board.pop("refresh")
    assert json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder)) != board


def test_queries_name_metrics_that_there_are_and_choose_the_run() -> None:
    for _, chart in CHARTS:
        for expression, _ in chart.queries:
            names = families_of(expression)
            assert names or "ALERTS" in expression, expression
            assert of_run(expression).count('instance=~"$run"') == len(names)
    assert of_run('sum(asyncrl_a{b="c"}) / asyncrl_d') == (
        'sum(asyncrl_a{instance=~"$run", b="c"}) / asyncrl_d{instance=~"$run"}'
    )
    with pytest.raises(KeyError):
        families_of("rate(asyncrl_no_such_thing_total[5m])")


def test_the_compose_file_mounts_what_is_there() -> None:
    services = yaml.safe_load((GRAFANA / "compose.yml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    files = {(GRAFANA / path).resolve() for path in mounted if path.startswith(".")}
    assert all(path.is_file() for path in files)
    expected = {path for path in GRAFANA.iterdir() if path.name != "compose.yml"} | {*PROMETHEUS.iterdir()}
    assert files == {path.resolve() for path in expected}
    source = yaml.safe_load((GRAFANA / "datasource.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
    provider = yaml.safe_load((GRAFANA / "dashboards.yml").read_text())["providers"][0]
    assert f"{provider['options']['path']}/overview.json" in (GRAFANA / "compose.yml").read_text()


def test_the_page_shows_a_picture_of_every_dashboard_and_commands_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "configs" / "DASHBOARDS.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert shown == [f"pictures/{board.name}.png" for board in BOARDS]
    assert {path.name for path in (ROOT / "configs" / "pictures").iterdir()} == {Path(path).name for path in shown}
    for path in shown:
        picture = (ROOT / "configs" / path).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 2**18, f"{path} is large for a repository"
    commands = [line.split() for line in re.findall(r"^asyncrl .*$", page, re.MULTILINE)]
    assert len(commands) == 2
    for words in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main([*words[1:], "--help"])
        assert ended.value.code == 0
        help_text = capsys.readouterr().out
        assert all(word in help_text for word in words if word.startswith("--"))


@pytest.mark.skipif(bool(missing("promtool")), reason=missing("promtool") or "it is there")
def test_the_configuration_of_prometheus_is_valid() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(PROMETHEUS / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- a real run, scraped by a real Prometheus -------------------------------------------------------------------

_ENOUGH = (  # rates need growth after a series' first scrape, and engines are read more rarely than a fast step ends
    "asyncrl_steps_total >= 8 and on (instance) "
    "sum by (instance) (increase(asyncrl_engine_prefix_cache_query_tokens_total[5m])) > 0"
)
_WAIT_S = 240.0  # eight steps of a tiny model take seconds, and minutes on a machine that is busy


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped several steps of a run, which still goes on."""
    place = tmp_path_factory.mktemp("watched")
    settings = {"run.directory": str(place / f"run_{os.getpid()}"), "run.steps": 1000}
    config = write_config(place / "tiny.toml", build_tiny_model(place / "model"), settings)
    run = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "train", str(config)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    try:
        target = next((found for line in run.stdout if (found := re.search(r"http://(\S+)/metrics", line))), None)
        assert target is not None
        with serving(place, target[1], PROMETHEUS / "alerts.yml") as prometheus:
            prometheus.wait(_ENOUGH, timeout_s=_WAIT_S)
            yield prometheus
        run.send_signal(signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(timeout=60) == 130, rest
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def filled(expression: str) -> str:
    """Return an expression as Grafana would send it."""
    return of_run(expression).replace("$run", ".+").replace("$__rate_interval", "5m")


@needs_prometheus
@pytest.mark.engine
@pytest.mark.slow
def test_every_query_of_every_panel_finds_something_in_a_real_run(watched: Prometheus) -> None:
    """Some figures exist only of some steps (engine mismatch of those that hold tokens of the newest version, say)."""
    empty = {f"{board.title} / {chart.title}: {x}": filled(x) for board, chart in CHARTS for x, _ in chart.queries}
    deadline = time.monotonic() + _WAIT_S
    while empty and time.monotonic() < deadline:
        empty = {name: expression for name, expression in empty.items() if not finds(watched, expression)}
        watched.wait(f"asyncrl_steps_total > {watched.query('asyncrl_steps_total')[0][1]}", timeout_s=_WAIT_S)
    assert not empty, "\n".join(f"{name} finds {watched.query(expression)[:3]}" for name, expression in empty.items())
    assert watched.query(filled(SPIKE)) == []


def finds(prometheus: Prometheus, expression: str) -> bool:
    """Tell whether an expression has a number now."""
    return any(math.isfinite(value) for _, value in prometheus.query(expression))


@needs_prometheus
@pytest.mark.engine
@pytest.mark.slow
def test_every_dashboard_is_drawn_from_a_real_run(
    watched: Prometheus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pictures"
    assert cli.main(["dashboards", "render", "--prometheus", watched.url, "--out", str(out)]) == 0
    assert {path.stem for path in out.iterdir()} == {board.name for board in BOARDS}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())
    assert capsys.readouterr().out.splitlines() == [
        f"{out / board.name}.png: {len(list(board.charts))} panels" for board in BOARDS
    ]


@needs_prometheus
@pytest.mark.engine
@pytest.mark.slow
def test_the_rules_are_evaluated_and_a_healthy_run_sets_off_none_of_the_critical_ones(watched: Prometheus) -> None:
    rules: list[dict[str, Any]] = [rule for group in watched.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    critical = watched.query('ALERTS{alertstate="firing", severity="critical"}')
    assert critical == []


@needs_prometheus
@pytest.mark.engine
@pytest.mark.slow
def test_what_the_engine_and_the_sandboxes_say_of_themselves_arrives(watched: Prometheus) -> None:
    ((_, own),) = watched.query("asyncrl_engine_generation_tokens_total")
    ((_, ours),) = watched.query("asyncrl_engine_tokens_sampled_total")
    assert own > 0
    assert ours > 0
    ((_, commands),) = watched.query("sum(asyncrl_sandbox_commands_total)")
    ((_, episodes),) = watched.query('sum(asyncrl_trajectories_total{status="completed"})')
    assert commands >= episodes > 0
    memory = {labels["role"]: value for labels, value in watched.query("asyncrl_memory_bytes")}
    assert memory["engines"] > 2**28
    assert memory["learner"] > 2**27


def test_charts_say_what_they_show() -> None:
    described = {chart.title: chart.description for _, chart in CHARTS if isinstance(chart, Chart)}
    assert "Worry: below 0.5." in described["effective sample size"]
