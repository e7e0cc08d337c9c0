"""Grafana's own form of the dashboards: `python -m asyncrl.dashboards.build configs/grafana` writes the files.

By Grafana's foundation SDK, whose types are its schema. Only who changes a dashboard needs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ScaleDistributionConfig,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from asyncrl.dashboards.boards import BOARDS
from asyncrl.dashboards.chart import Board, Chart, Look, of_run

SPIKE = "asyncrl_importance_ratio_max > 10 * quantile_over_time(0.5, asyncrl_importance_ratio_max[1h])"
"""Marks in every dashboard, and an alert."""

_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${source}")
_HEIGHT, _WIDTH, _SMALL = 8, 8, 3  # of 24 columns: three panels a row, eight numbers


def to_json(board: Board) -> str:
    """Return a dashboard as Grafana reads it from a file."""
    builder = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .tags(["asyncrl"])
        .refresh("15s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            build.QueryVariable("run")
            .label("run")
            .datasource(_SOURCE)
            .query("label_values(asyncrl_policy_version, instance)")
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".+")
            .multi(True)
            .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
        )
        .annotation(
            build.AnnotationQuery()
            .name("spikes of the ratio: `asyncrl spikes RUN` names the tokens")
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("red")
            .expr(of_run(SPIKE))
        )
        .link(build.DashboardLink("asyncrl").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["asyncrl"]).as_dropdown(True).keep_time(True)
              .include_vars(True))
    )  # fmt: skip
    for title, charts in board.rows:
        builder = builder.with_row(build.Row(title))
        for chart in charts:
            builder = builder.with_panel(_panel(chart))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _panel(chart: Chart) -> Any:
    panel = _LOOKS[chart.look](chart)
    panel = panel.title(chart.title).description(chart.description).datasource(_SOURCE).unit(chart.unit)
    panel = panel.height(_SMALL if chart.look is Look.NUMBER else _HEIGHT)
    panel = panel.span(_SMALL if chart.look is Look.NUMBER else _WIDTH)
    for place, (expression, legend) in enumerate(chart.queries):
        query = prometheus.Dataquery().expr(of_run(expression)).legend_format(legend).ref_id(chr(ord("A") + place))
        if chart.look is Look.HEATMAP:
            query = query.format(PromQueryFormat.HEATMAP)
        panel = panel.with_target(query)
    return panel


def _lines(chart: Chart) -> Any:
    panel = timeseries.Panel().line_width(1).fill_opacity(0).show_points(common.VisibilityMode.AUTO)
    panel = panel.tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    panel = panel.legend(VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
    if chart.logarithmic:
        scale = ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return panel


def _stacked(chart: Chart) -> Any:
    return _lines(chart).fill_opacity(40).stacking(StackingConfig().mode(common.StackingMode.NORMAL))


def _number(chart: Chart) -> Any:
    colours = ("green", "yellow", "red")
    steps = [
        dashboard.Threshold(value=value, color=colour)
        for value, colour in zip((None, *chart.limits), colours, strict=False)
    ]
    thresholds = build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
    return stat.Panel().graph_mode(common.BigValueGraphMode.AREA).thresholds(thresholds)


def _heatmap(chart: Chart) -> Any:
    scale = ScaleDistributionConfig().type(common.ScaleDistribution.LINEAR)
    return heatmap.Panel().calculate(False).scale_distribution(scale)


_LOOKS = {Look.LINES: _lines, Look.STACKED: _stacked, Look.NUMBER: _number, Look.HEATMAP: _heatmap}


def write(directory: Path) -> None:
    """Write a file for every dashboard."""
    for board in BOARDS:
        (directory / f"{board.name}.json").write_text(to_json(board), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
