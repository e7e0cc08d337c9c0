"""The open sandboxes of one launcher, what they are made of, and how they go away. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from asyncrl.sandbox import cgroups, kernel, leases, profile, safe_files
from asyncrl.sandbox.commands import Box
from asyncrl.sandbox.layers import Layer, Layers
from asyncrl.sandbox.spawn import user

_REMOVE_TRIES = 500  # a group stays busy for some ms after its last process, longer on a busy machine
_REMOVE_PAUSE_S = 0.01  # so five seconds in all
_OUTER_PROCESSES = 4  # bubblewrap and its first process inside, for one command and for the shell
_MAX_LIMIT = 2**63  # what the kernel counts with
_OVERLAY_FILES = 8  # an overlay's own directories, and those that a sandbox begins with
_PLACE = re.compile(r"(/[A-Za-z0-9_.-]+)+")
_TAKEN = re.compile(r"/(usr|bin|sbin|lib\w*|etc|proc|dev|sys|tmp)(/.*)?")


class RequestError(Exception):
    """A request that cannot be carried out; `kind` tells the other side which error to raise."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Boxes:
    """Makes sandboxes and layers, and removes them with everything that belongs to them."""

    def __init__(
        self,
        root: str,
        hierarchy: cgroups.Hierarchy | None,
        ledger: leases.Ledger,
        *,
        choose_user: Callable[[int], int | None] = user,
    ) -> None:
        """Keep everything below the directory `root`, which holds the empty folders `box` and `layer`.

        Args: `choose_user` returns the owner of the files of the n-th sandbox.
        """
        self._root = root
        self._choose_user = choose_user
        self._hierarchy = hierarchy
        self._ledger = ledger
        self._layers = Layers(os.path.join(root, "layer"))
        self._open: dict[str, Box] = {}
        self._over: dict[str, str] = {}
        """Name -> why a sandbox was closed before its owner did."""
        self._dying: list[tuple[cgroups.Group, str, int]] = []
        self._num_users = 0

    def __iter__(self) -> Iterator[Box]:
        return iter(list(self._open.values()))

    def get(self, name: str) -> Box:
        """Return an open sandbox. Raises RequestError."""
        try:
            return self._open[name]
        except KeyError:
            reason = self._over.get(name, "")
            raise RequestError("closed", f"the sandbox {name} is closed{reason}") from None

    def _new_user(self) -> int | None:
        self._num_users += 1
        return self._choose_user(self._num_users)

    # --- layers -----------------------------------------------------------------------------------------------

    def prepare(self, name: str, files: Mapping[str, bytes], executable: Collection[str]) -> Layer:
        """Return a new layer of `files`. Raises OSError, safe_files.UnsafePathError."""
        return self._layers.write(name, files, executable, self._new_user())

    def snapshot(self, name: str, box: Box) -> Layer:
        """Return a new layer of what is in the sandbox's working directory. Raises OSError."""
        size = box.limits["disk_bytes"], box.limits["max_files"] + _OVERLAY_FILES
        return self._layers.copy(name, box.changed, os.path.join(box.path, "task"), box.layer, box.uid, size)

    def release(self, name: str) -> None:
        """Give up the owner's hold of a layer. An unknown one counts as released."""
        layer = self._layers.by_name.pop(name, None)
        if layer is not None:
            self._layers.let_go(layer)

    def _layer(self, name: str) -> Layer:
        try:
            return self._layers.get(name)
        except KeyError:
            raise RequestError("closed", f"the snapshot {name} is closed") from None

    # --- sandboxes --------------------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        limits: dict[str, Any],
        *,
        layer: str | None = None,
        work: str = profile.WORK,
        places: Mapping[str, str | None],
        files: Mapping[str, bytes],
        image: str = "",
    ) -> Box:
        """Return a new sandbox. Raises OSError, RequestError, safe_files.UnsafePathError."""
        _check_limits(limits)
        below = None if layer is None else self._layer(layer)
        shown = {path: None if place is None else self._layer(place) for path, place in places.items()}
        _check_places([work, *shown])
        if below is not None:
            _check_fits(below, limits)
        return self._new(name, limits, below, work, shown, files, image)

    def fork(self, name: str, box: Box) -> Box:
        """Return a new sandbox over a copy of what was changed in `box`. Raises as `open` does."""
        layer = self.snapshot(f"{name}-fork", box)
        try:
            return self._new(name, box.limits, layer, box.work, box.places, {}, box.image)
        finally:
            self.release(layer.name)

    def _new(
        self,
        name: str,
        limits: dict[str, Any],
        layer: Layer | None,
        work: str,
        shown: Mapping[str, Layer | None],
        files: Mapping[str, bytes],
        image: str,
    ) -> Box:
        box = Box(
            name=name,
            path=os.path.join(self._root, "box", name),
            uid=self._new_user() if layer is None else layer.uid,
            limits=limits,
            work=work,
            layer=layer,
            deadline=time.monotonic() + limits["lifetime_s"],
            image=image,
        )
        self.lease(box)
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove, box)
            self._make(box, shown)
            for file, content in files.items():
                safe_files.write_file(box.directory, file, content, box.uid)
            undo.pop_all()
        self._open[name] = box
        return box

    def lease(self, box: Box, *, containers: Collection[str] = (), engine: str = "") -> None:
        """Write down what will exist, before any of it does; and `containers` beside what was said before."""
        box.containers += containers
        group = () if self._hierarchy is None else self._hierarchy.planned(box.name).directories()
        lease = {
            "box": box.name, "pid": os.getpid(), "group": group, "mounts": [box.path],
            "deadline_s_after_boot": time.clock_gettime(time.CLOCK_BOOTTIME) + box.limits["lifetime_s"],
            "containers": box.containers, "engine": engine,
        }  # fmt: skip
        self._ledger.write(box.name, lease)

    def _make(self, box: Box, shown: Mapping[str, Layer | None]) -> None:
        limits, uid = box.limits, box.uid
        if self._hierarchy is not None:
            max_pids = limits["max_pids"] + _OUTER_PROCESSES
            box.group = self._hierarchy.planned(box.name)  # also half of one has to be removed
            self._hierarchy.create(box.name, memory_bytes=limits["memory_bytes"], max_pids=max_pids)
        os.mkdir(box.path, 0o755)
        options = f"size={limits['disk_bytes']},nr_inodes={limits['max_files'] + _OVERLAY_FILES},mode=755"
        kernel.mount("asyncrl", box.path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        box.mounts.append(box.path)
        for below, mode in (("task", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
            self._directory(os.path.join(box.path, below), uid, mode)
        if box.layer is not None:
            box.layer.held += 1
            box.held.append(box.layer)
            for below in ("changed", "work"):
                self._directory(os.path.join(box.path, below), uid, 0o755)
            task = os.path.join(box.path, "task")
            self._layers.overlay(box.layer, task, box.changed, os.path.join(box.path, "work"))
            box.mounts.append(task)
        box.directory = os.open(os.path.join(box.path, "task"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for number, (path, layer) in enumerate(sorted(shown.items())):
            source = os.path.join(box.path, f"place-{number}")
            self._directory(source, uid, 0o755)
            if layer is not None:
                layer.held += 1
                box.held.append(layer)
                self._layers.overlay(layer, source, None, None)
                box.mounts.append(source)
            box.places[path] = layer
            box.binds.append((path, source, layer is None))

    def _directory(self, path: str, uid: int | None, mode: int) -> None:
        os.mkdir(path)
        os.chmod(path, mode)
        if uid is not None:
            os.chown(path, uid, uid)

    @contextlib.contextmanager
    def writable(self, box: Box, path: str) -> Iterator[tuple[int, str]]:
        """Yield the directory that `path` lies in, open while the body runs, and the rest of the path.

        Raises: safe_files.UnsafePathError for an absolute path that lies in no writable place.
        """
        directory, below = self._place_of(box, path)
        try:
            yield directory, below
        finally:
            os.close(directory)

    def _place_of(self, box: Box, path: str) -> tuple[int, str]:
        if not path.startswith("/"):
            return os.dup(box.directory), path
        places = [(box.work, os.path.join(box.path, "task"))]
        places += [(place, source) for place, source, writable in box.binds if writable]
        for place, source in sorted(places, reverse=True):
            if path == place or path.startswith(place + "/"):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                return os.open(source, flags), path[len(place) + 1 :] or "."
        names = ", ".join(place for place, _ in places)
        raise safe_files.UnsafePathError(f"{path!r} must be relative, or lie in one of {names}")

    # --- removal ----------------------------------------------------------------------------------------------

    def take(self, name: str) -> Box | None:
        """Return an open sandbox that is about to be discarded; nothing more can be asked of it."""
        return self._open.pop(name, None)

    def discard(self, box: Box) -> None:
        """Remove a sandbox that was taken, and in which nothing runs any more."""
        self._remove(box)

    def expire(self, box: Box) -> None:
        """Note that the sandbox's time is over; requests will be answered so."""
        self._over[box.name] = f": its lifetime of {box.limits['lifetime_s']:g} s is over (limits.lifetime_s)"

    def forget(self, name: str) -> None:
        """Forget why a sandbox was closed, as its owner has closed it too."""
        self._over.pop(name, None)

    def _remove(self, box: Box) -> None:
        if box.directory >= 0:
            os.close(box.directory)
            box.directory = -1
        for path in reversed(box.mounts):
            kernel.unmount(path)
        with contextlib.suppress(FileNotFoundError):  # it failed before that was made
            os.rmdir(box.path)
        for layer in box.held:
            self._layers.let_go(layer)
        if box.group is not None:
            box.group.kill()
            self._dying.append((box.group, box.name, 0))
            self.remove_dying()
        else:
            self._ledger.remove(box.name)

    def is_dying(self) -> bool:
        """Return whether groups wait for their last process to be gone."""
        return bool(self._dying)

    def remove_dying(self) -> None:
        """Remove the groups that are empty by now."""
        left = []
        for group, name, tries in self._dying:
            if group.remove():
                self._ledger.remove(name)
            elif tries < _REMOVE_TRIES:
                left.append((group, name, tries + 1))
        self._dying = left  # what stays busy too long keeps its lease, and the next start removes it

    def remove_all(self) -> None:
        """Remove every sandbox, then the groups above them, waiting for the last processes."""
        for box in self:
            self._open.pop(box.name)
            self._remove(box)
        while self._dying:
            self.remove_dying()
            time.sleep(_REMOVE_PAUSE_S)  # version 1 tells nobody when a group becomes empty
        if self._hierarchy is None or self._hierarchy.remove():
            self._ledger.remove("launcher")


def _check_limits(limits: Mapping[str, Any]) -> None:
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_LIMIT:
            raise RequestError("limits", f"{name} must be a number above 0 and below 2**63, got {value!r} (limits)")


def _check_places(places: Collection[str]) -> None:
    for path in places:
        if not _PLACE.fullmatch(path) or {".", ".."} & set(path.split("/")) or _TAKEN.fullmatch(path):
            raise RequestError(
                "places", f"a place must be an absolute path of plain names outside the system's own, got {path!r}"
            )
    nested = [(a, b) for a in places for b in places if a != b and a.startswith(b + "/")]
    if nested or len(set(places)) != len(places):
        raise RequestError("places", f"places must not lie in each other, got {', '.join(sorted(places))}")


def _check_fits(layer: Layer, limits: Mapping[str, Any]) -> None:
    num_bytes, num_files = layer.totals()
    for name, found, allowed in (
        ("disk_bytes", num_bytes, limits["disk_bytes"]),
        ("max_files", num_files, limits["max_files"]),
    ):
        if found > allowed:
            raise RequestError("limits", f"the files of the snapshot have {name} {found}, allowed are {allowed}")
