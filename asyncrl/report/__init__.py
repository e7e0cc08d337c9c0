"""One HTML file about one run or several: pictures, spikes in their context, trajectories, configuration."""

from asyncrl.report.page import render
from asyncrl.report.reading import RunData, read_run

__all__ = ["RunData", "read_run", "render"]
