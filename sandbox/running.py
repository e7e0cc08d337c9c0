"""The commands that run in the sandboxes of one launcher: started, fed, watched, ended. Standard library only."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncrl.sandbox import cgroups, profile
from asyncrl.sandbox.commands import NEW_SHELL, Box, Command, Stream, as_signal, exit_code, outcome, reported
from asyncrl.sandbox.spawn import REPORT, spawn

_READ_BYTES = 65536
_KILL_GRACE_S = 10.0  # a process that is not gone by then hangs in the kernel; the sandbox is given up
_SHELLS = ("/bin/bash", "--noprofile", "--norc", "-s"), ("/bin/sh", "-s")
_NEVER = float("inf")

Answer = Callable[[int, dict[str, Any], tuple[bytes, ...]], None]


class Runner:
    """All running commands."""

    def __init__(self, selector: selectors.BaseSelector, answer: Answer, when_started: Callable[[], None]) -> None:
        """`answer` is called with each result, `when_started` when one more may be started than before."""
        self._selector = selector
        self._answer = answer
        self._when_started = when_started
        self._commands: list[Command] = []
        self._starting: set[int] = set()
        self.max_starting = 1
        self.seccomp = b""
        self.stage: profile.Stage | None = None

    def may_start(self) -> bool:
        """Return whether one more command may be started now."""
        return len(self._starting) < self.max_starting

    # --- beginning --------------------------------------------------------------------------------------------

    def start(self, request: int, box: Box, argv: Sequence[str], stdin: bytes, asked: dict[str, Any]) -> None:
        """Start a command of its own. Raises OSError."""
        box.command = self._spawn(box, argv, stdin, reports=False)
        self._begin(box.command, request, asked)

    def run_in_shell(self, request: int, box: Box, text: str, asked: dict[str, Any]) -> None:
        """Run `text` in the sandbox's shell, which is started where there is none. Raises OSError."""
        if box.shell is None:
            argv = next((argv for argv in _SHELLS if os.path.exists(argv[0])), _SHELLS[-1])
            box.shell = self._spawn(box, argv, b"", reports=True)
            box.num_shells += 1
            box.shell.is_new = box.num_shells > 1
        else:
            box.shell.is_new = False
            for descriptor in box.shell.streams:
                self._watch_output(box.shell, descriptor)
        shell = box.shell
        self._begin(shell, request, asked)
        shell.number += 1
        # not in a loop and not in a function, so that no `break` or `local` of the agent's meets one of ours
        line = f"eval {shlex.quote(text)} </dev/null {REPORT}>&-\nprintf '{shell.number} %s\\n' \"$?\" >&{REPORT}\n"
        shell.pending += os.fsencode(line)
        assert shell.stdin is not None
        self._watch(shell.stdin, selectors.EVENT_WRITE, partial(self._on_stdin, shell))

    def _begin(self, command: Command, request: int, asked: dict[str, Any]) -> None:
        keep = asked["kept_output_bytes"]
        command.request = request
        command.started = time.monotonic()
        command.deadline = command.started + asked["wall_s"]
        command.before = _counters(command.box)
        command.outputs = Stream(keep), Stream(keep)
        command.max_output_bytes = asked["output_bytes"]

    def _spawn(self, box: Box, argv: Sequence[str], stdin: bytes, *, reports: bool) -> Command:
        assert self.stage is not None
        has_input = bool(stdin) or reports
        spawned = spawn(self.stage, box, argv, has_input=has_input, seccomp=self.seccomp, reports=reports)
        command = Command(
            request=None,
            box=box,
            pid=spawned.pid,
            pidfd=os.pidfd_open(spawned.pid),
            started=0.0,
            deadline=_NEVER,
            before=cgroups.Counters(),
            outputs=(Stream(0), Stream(0)),
            max_output_bytes=0,
            streams={spawned.stdout: 0, spawned.stderr: 1},
            status=spawned.status,
            stdin=spawned.stdin,
            pending=stdin,
            report=spawned.report,
        )
        self._commands.append(command)
        self._starting.add(command.pid)
        for descriptor in command.streams:
            os.set_blocking(descriptor, False)
            self._watch_output(command, descriptor)
        self._watch(command.status, selectors.EVENT_READ, partial(self._on_status, command))
        self._watch(command.pidfd, selectors.EVENT_READ, partial(self._on_exit, command))
        if command.stdin is not None:
            os.set_blocking(command.stdin, False)
            if stdin:
                self._watch(command.stdin, selectors.EVENT_WRITE, partial(self._on_stdin, command))
        if reports:
            os.set_blocking(command.report, False)
            self._watch(command.report, selectors.EVENT_READ, partial(self._on_report, command))
        return command

    # --- events -----------------------------------------------------------------------------------------------

    def _watch(self, descriptor: int, events: int, handler: Callable[[], object]) -> None:
        if descriptor not in self._selector.get_map():
            self._selector.register(descriptor, events, handler)

    def _unwatch(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._unwatch(descriptor)
        os.close(descriptor)

    def _watch_output(self, command: Command, descriptor: int) -> None:
        self._watch(descriptor, selectors.EVENT_READ, partial(self._on_output, command, descriptor))

    def _on_output(self, command: Command, descriptor: int) -> bool:
        """Take what there is; return whether there was any."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._forget(descriptor)
            del command.streams[descriptor]
            self._finish_if_ended(command)
            return False
        command.outputs[command.streams[descriptor]].add(data)
        if command.num_bytes > command.max_output_bytes:
            self._end(command, "output")
        return True

    def _on_stdin(self, command: Command) -> None:
        assert command.stdin is not None
        try:
            command.pending = command.pending[os.write(command.stdin, command.pending[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            command.pending = b""
        if command.pending:
            return
        self._unwatch(command.stdin)
        if not command.is_shell:
            os.close(command.stdin)
            command.stdin = None

    def _on_status(self, command: Command) -> None:
        """bubblewrap reports its child when that has begun, and the exit code when the set-up had worked."""
        data = os.read(command.status, _READ_BYTES)
        command.status_text += data
        if not data:
            self._forget(command.status)
            command.status = -1
            self._finish_if_ended(command)
        elif (
            command.init is None
            and not command.init_gone
            and (pid := reported(command.status_text, "child-pid")) is not None
        ):
            self._watch_init(command, pid)
        self._starting.discard(command.pid)
        self._when_started()

    def _watch_init(self, command: Command, pid: int) -> None:
        try:
            command.init = os.pidfd_open(pid)
        except ProcessLookupError:
            command.init_gone = True
        else:
            self._watch(command.init, selectors.EVENT_READ, partial(self._on_init_exit, command))

    def _on_init_exit(self, command: Command) -> None:
        assert command.init is not None
        self._unwatch(command.init)
        command.init_gone = True
        self._finish_if_ended(command)

    def _on_exit(self, command: Command) -> None:
        if command.exit_status is None:
            _, command.exit_status = os.waitpid(command.pid, 0)
            self._forget(command.pidfd)
            self._starting.discard(command.pid)
        if command.is_shell and command.request is None:
            for descriptor in command.streams:  # what its background processes wrote belongs to no command
                self._watch_output(command, descriptor)
        self._finish_if_ended(command)

    def _on_report(self, command: Command) -> None:
        """The shell's present command has ended; all that it had written lies in the pipes by now."""
        data = os.read(command.report, _READ_BYTES)
        if not data:
            self._unwatch(command.report)
            return
        command.report_text = (command.report_text + data)[-_READ_BYTES:]
        for line in command.report_text.split(b"\n")[:-1]:
            number, _, code = line.partition(b" ")
            if number == b"%d" % command.number and code.isdigit() and command.request is not None:
                self._answer_for_shell(command, int(code))
        command.report_text = command.report_text.rpartition(b"\n")[2]

    def _answer_for_shell(self, shell: Command, code: int) -> None:
        for descriptor in list(shell.streams):
            while descriptor in shell.streams and shell.ended_by is None and self._on_output(shell, descriptor):
                pass
        if shell.ended_by is not None or shell.request is None:
            return  # it wrote too much at last, and is answered for when it is gone
        self._reply(shell, as_signal(code), stuck=False)
        for descriptor in shell.streams:  # what background processes write meanwhile waits in the pipes
            self._unwatch(descriptor)

    # --- ending -----------------------------------------------------------------------------------------------

    def after_end(self, box: Box, action: Callable[[], None]) -> bool:
        """Have `action` done once the sandbox's shell is gone, if it is going; return whether it is."""
        if box.shell is None or box.shell.ended_by is None:
            return False
        box.when_idle.append(action)
        return True

    def kill(self, box: Box, when_idle: Callable[[], None]) -> None:
        """End everything in a sandbox, and call `when_idle` once it is gone."""
        running = [command for command in (box.command, box.shell) if command is not None]
        box.when_idle.append(when_idle)
        for command in running:
            self._end(command, "closed")
        self._tell_idle(box)

    def _end(self, command: Command, reason: str) -> None:
        if command.ended_by is None:
            command.ended_by = reason
            command.deadline = time.monotonic() + _KILL_GRACE_S
        box = command.box
        if box.group is not None:
            box.group.kill()
            box.was_killed = True
            if box.shell is not None and box.shell.ended_by is None:  # the whole group is gone, and it too
                self._end(box.shell, "closed")
        if command.exit_status is None:
            signal.pidfd_send_signal(command.pidfd, signal.SIGKILL)

    def next_deadline(self) -> float:
        """Return when `end_late` must be called at the latest."""
        return min((command.deadline for command in self._commands), default=_NEVER)

    def end_late(self) -> None:
        """End the commands whose time is over, and give up those that cannot be killed."""
        now = time.monotonic()
        for command in list(self._commands):
            if now >= command.deadline:
                if command.ended_by is None:
                    self._end(command, "wall")
                else:
                    self._finish(command, stuck=True)

    def is_busy(self) -> bool:
        """Return whether any process is left."""
        return bool(self._commands)

    def _finish_if_ended(self, command: Command) -> None:
        if (
            command.exit_status is not None
            and not command.streams
            and command.status < 0
            and (command.init is None or command.init_gone)
        ):
            self._finish(command, stuck=False)

    def _finish(self, command: Command, *, stuck: bool) -> None:
        """Answer the request, if there is one, and forget the command."""
        if command not in self._commands:
            return
        self._commands.remove(command)
        box = command.box
        if command.is_shell:
            box.shell = None
        else:
            box.command = None
        for descriptor in (*command.streams, command.status, command.stdin, command.report):
            if descriptor is not None and descriptor >= 0:
                self._forget(descriptor)
        self._reap_init(command)
        if command.request is not None:
            code = exit_code(command, command.outputs[1].result()[0])
            if code is None and command.is_shell and reported(command.status_text, "child-pid") is not None:
                code = -signal.SIGKILL  # with its group, for want of memory; a shell that had begun is no failed start
            self._reply(command, code, stuck=stuck)
        self._tell_idle(box)
        self._when_started()

    def _tell_idle(self, box: Box) -> None:
        if box.command is None and box.shell is None:
            actions, box.when_idle = box.when_idle, []
            for action in actions:
                action()

    def _reap_init(self, command: Command) -> None:
        """Wait for the first process inside, which bubblewrap leaves to its own parent when it is faster than that."""
        if command.init is None:
            return
        self._unwatch(command.init)
        with contextlib.suppress(ChildProcessError):  # bubblewrap has waited
            os.waitid(os.P_PIDFD, command.init, os.WEXITED | os.WNOHANG)
        os.close(command.init)

    def _reply(self, command: Command, code: int | None, *, stuck: bool) -> None:
        """Answer with the outcome told from counters."""
        assert command.request is not None
        counters = _counters(command.box)
        (stdout, cut), (stderr, cut_too) = command.outputs[0].result(), command.outputs[1].result()
        ended, detail = outcome(
            ended_by=command.ended_by, before=command.before, after=counters, code=code, limits=command.box.limits,
            disk=command.box.path, unstarted=stderr.decode(errors="replace").strip(),
        )  # fmt: skip
        if stuck:
            ended, detail = "infrastructure", "a process could not be killed"
        elif command.is_new and ended != "infrastructure":
            detail = NEW_SHELL
        request, command.request = command.request, None
        if command.ended_by is None:
            command.deadline = _NEVER
        reply = {
            "outcome": ended,
            "exit_code": None if command.ended_by is not None or ended == "infrastructure" else code,
            "truncated": cut or cut_too,
            "output_bytes": command.num_bytes,
            "seconds": time.monotonic() - command.started,
            "peak_memory_bytes": counters.peak_memory_bytes,
            "peak_pids": counters.peak_pids,
            "detail": detail,
        }
        self._answer(request, reply, (stdout, stderr))


def _counters(box: Box) -> cgroups.Counters:
    return cgroups.Counters() if box.group is None else box.group.counters()
