"""Grafana dashboards as code: tables of panels (`boards`), and Grafana's form of them (`build`) in configs/grafana."""

from asyncrl.dashboards.boards import BOARDS as BOARDS
from asyncrl.dashboards.chart import Board as Board
from asyncrl.dashboards.chart import Chart as Chart
from asyncrl.dashboards.chart import families_of as families_of
from asyncrl.dashboards.chart import of_run as of_run
