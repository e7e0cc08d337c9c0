"""What a person sees while a run goes: a live table on a terminal, plain lines in a log file.

rich draws, and a task refreshes: the clocks that are shown are trio's, which a thread of rich's own may not ask.
curses was rejected because it takes the whole screen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.guards import Action, Alarm
from asyncrl.run import Run
from asyncrl.status import EvaluationResult

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "step", "{:.0f}"),
    ("solved", "solve_rate", "{:.2f}"),
    ("reward", "reward_mean", "{:.2f}"),
    ("staleness", "staleness_max", "{:.0f}"),
    ("max ratio", "importance_ratio_max", "{:.2f}"),
    ("ESS", "ess_token", "{:.2f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("engine tok/s", "generated_tokens_per_second", "{:.0f}"),
    ("learner tok/s", "tokens_per_second", "{:.0f}"),
    ("step s", "step_seconds", "{:.1f}"),
    ("sync s", "sync_seconds", "{:.2f}"),
    ("time", "seconds", "{:.0f} s"),
)
_WARM_START_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("warm start step", "step", "{:.0f}"),
    ("of", "num_steps", "{:.0f}"),
    ("loss", "loss", "{:.3f}"),
    ("held-out perplexity", "held_out_perplexity", "{:.3f}"),
    ("tokens", "tokens_trained", "{:.0f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("learner tok/s", "tokens_per_second", "{:.0f}"),
    ("time", "seconds", "{:.0f} s"),
)
_SHOWN_STEPS = 8
_REFRESH_S = 0.25  # the seconds that are shown tick; more often costs the cores that generate


class Progress:
    """Shows one run on a console."""

    def __init__(self, console: Console, *, title: str, max_steps: int) -> None:
        self._console = console
        # A terminal that cannot move its cursor gets the lines of a log file: a live table would show at the end only.
        self._draws = console.is_terminal and not console.is_dumb_terminal
        self._title = title
        self._max_steps = max_steps
        self._rows = deque[Mapping[str, float]](maxlen=_SHOWN_STEPS)
        self._warm_start_rows = deque[Mapping[str, float]](maxlen=_SHOWN_STEPS)
        self._run: Run | None = None
        self.note = "starting"
        """What is going on besides the run's steps; empty for nothing."""

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show the live table while inside, where the console is a terminal."""
        if not self._draws:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, auto_refresh=False) as live:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_refresh, live)
                yield
                nursery.cancel_scope.cancel()
            live.refresh()

    def watch(self, run: Run) -> None:
        """Show this run's moment from now on."""
        self._run, self.note = run, ""

    def say(self, note: str) -> None:
        """Say what is going on, once in a log file and as long as it lasts on a terminal."""
        self.note = note
        if not self._draws:
            self._console.print(note, highlight=False)

    def step(self, record: Mapping[str, float]) -> None:
        """Show one more step on rollouts."""
        self._rows.append(record)
        self._print(record, _COLUMNS)

    def warm_step(self, record: Mapping[str, float]) -> None:
        """Show one more step on demonstrations."""
        self._warm_start_rows.append(record)
        self._print(record, _WARM_START_COLUMNS)

    def _print(self, record: Mapping[str, float], columns: Sequence[tuple[str, str, str]]) -> None:
        if not self._draws:
            cells = (f"{title} {text.format(record[key])}" for title, key, text in columns if key in record)
            self._console.print("  ".join(cells), highlight=False, soft_wrap=True)

    def alarm(self, alarm: Alarm, *, pid: int) -> None:
        """Print what a guard saw and did."""
        more = f"; kill -USR1 {pid} goes on" if alarm.action is Action.PAUSE else ""
        self._console.print(f"guard {alarm.guard}: {alarm.words}{more}", highlight=False, soft_wrap=True)

    def stalled(self, chain: Sequence[str]) -> None:
        """Print who waits for whom, because it has lasted."""
        self._console.print("the learner has waited for long; each line waits for the next:", highlight=False)
        for line in chain:
            self._console.print(f"  {line}", highlight=False, soft_wrap=True)

    def evaluation(self, result: EvaluationResult) -> None:
        """Show a measurement of the held-out tasks."""
        self._console.print(
            f"held-out tasks at version {result.version}: {result.solve_rate:.3f} solved "
            f"({result.num_tasks} tasks, {result.num_samples} episodes, {result.seconds:.0f} s)",
            highlight=False,
        )

    def _render(self) -> RenderableType:
        if self._run is None:
            return Text(f"{self._title}: {self.note} ...")
        title = f"{self._title}, {self._run.status.steps} of at most {self._max_steps} steps"
        if self._warm_start_rows and not self._rows:
            table = _table(f"{self._title}, warm start", self._warm_start_rows, _WARM_START_COLUMNS)
        else:
            table = _table(title, self._rows, _COLUMNS)
        return Group(table, Text(moment(self._run)), *([Text(self.note)] if self.note else []))


async def _refresh(live: Live) -> None:
    while True:
        live.refresh()
        await trio.sleep(_REFRESH_S)


def _table(title: str, rows: Iterable[Mapping[str, float]], columns: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title=title, box=None)
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for record in rows:
        table.add_row(*(text.format(record[key]) if key in record else "" for _, key, text in columns))
    return table


def moment(run: Run) -> str:
    """Return one line on what the run does now and who waits for whom."""
    status, gate, buffer = run.status, run.gate.statistics(), run.buffer.statistics()
    parts = [status.phase if not status.waiting_for else f"{status.phase}: {status.waiting_for}"]
    if status.phase == "waiting for groups":
        parts[0] += f", {buffer.num_ready} ready"
        straggler, words = run.learner_idle.straggler, "the step cannot do without"
        if straggler is None:
            straggler, words = buffer.straggler, "the oldest running is"
        if straggler is not None:
            parts[0] += f", {words} group {straggler}, running for {gate.holders.get(straggler, 0.0):.0f} s"
    parts.append(f"{buffer.num_running} groups running, gate {gate.held} of {gate.num_slots}")
    return "; ".join(parts)
