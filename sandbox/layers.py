"""Files that many sandboxes lie over: each layer is a small tmpfs that nobody writes to again. Standard library only.

A sandbox over a layer is an overlay: the layer below, the sandbox's own tmpfs on top. To snapshot it is to copy what
lies on top, so a fork costs what was changed, not what is there. A layer goes when nothing lies over it any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from asyncrl.sandbox import kernel, safe_files

_MAX_DEPTH = 16  # of a chain of snapshots; a deeper one is flattened, since every look-up goes through all of them
_MAX_NESTED = 128  # directories; a copy goes as deep as they do, with two descriptors a level
_MAX_PATH = 4000  # of a hard link's first name; what lies deeper is copied
_SLACK_FILES = 16  # what a file system and an overlay need for themselves
_PAGE = 4096
_OVERLAY_NAMES = ("trusted.overlay.", "user.overlay.")
_BLOCK = 2**20


@dataclass(slots=True, eq=False)
class Layer:
    """Files below a sandbox, and the layers that these lie over in turn."""

    name: str
    path: str
    uid: int | None
    """Who owns the files; a sandbox over them runs as the same user."""
    num_bytes: int
    num_files: int
    below: tuple[Layer, ...] = ()
    """From the top down; without this layer."""
    held: int = 1
    """By the owner's handle, by sandboxes, and by layers above."""

    @property
    def tree(self) -> str:
        return os.path.join(self.path, "tree")

    def chain(self) -> tuple[Layer, ...]:
        """Return this layer and those below it, from the top down."""
        return (self, *self.below)

    def totals(self) -> tuple[int, int]:
        """Return bytes and files of the whole chain."""
        return sum(one.num_bytes for one in self.chain()), sum(one.num_files for one in self.chain())


@dataclass(slots=True)
class Layers:
    """All layers of one launcher."""

    root: str
    by_name: dict[str, Layer] = field(default_factory=dict)
    is_root: bool = field(default_factory=kernel.is_root_of_the_machine)

    def get(self, name: str) -> Layer:
        """Return an open layer. Raises KeyError."""
        return self.by_name[name]

    def write(self, name: str, files: Mapping[str, bytes], executable: Collection[str], uid: int | None) -> Layer:
        """Return a new layer of `files`. Raises OSError, safe_files.UnsafePathError."""
        num_bytes = sum(-(-len(content) // _PAGE) * _PAGE for content in files.values())
        above = {path[:end] for path in files for end, letter in enumerate(path) if letter == "/"}
        num_files = len(files) + len(above)
        with self._mounted(name, num_bytes, num_files, uid) as (directory, path):
            for file, content in files.items():
                safe_files.write_file(directory, file, content, uid, executable=file in executable)
        return self._keep(Layer(name=name, path=path, uid=uid, num_bytes=num_bytes, num_files=num_files))

    def copy(
        self, name: str, changed: str, merged: str, below: Layer | None, uid: int | None, size: tuple[int, int]
    ) -> Layer:
        """Return a new layer of what a sandbox has `changed` over `below`, or of all that is `merged` in a deep chain.

        Args: `size` bounds bytes and files. Raises OSError (ENOSPC where sparse files were filled).
        """
        chain = () if below is None else below.chain()
        source, chain = (changed, chain) if len(chain) < _MAX_DEPTH else (merged, ())
        if not chain and below is not None:
            total_bytes, total_files = below.totals()
            size = size[0] + total_bytes, size[1] + total_files
        with self._mounted(name, *size, uid) as (directory, path):
            opened = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                copied = _Copy(directory)
                copied.directory(opened, directory)
            finally:
                os.close(opened)
        for one in chain:
            one.held += 1
        num_bytes, num_files = copied.num_bytes, copied.num_files
        return self._keep(Layer(name=name, path=path, uid=uid, num_bytes=num_bytes, num_files=num_files, below=chain))

    @contextlib.contextmanager
    def _mounted(self, name: str, num_bytes: int, num_files: int, uid: int | None) -> Iterator[tuple[int, str]]:
        """Yield the open, empty tree of a new layer, and where its tmpfs is mounted; removed where the body fails."""
        path = os.path.join(self.root, name)
        options = f"size={num_bytes + _PAGE},nr_inodes={num_files + _SLACK_FILES},mode=755"
        with contextlib.ExitStack() as undo:
            os.mkdir(path, 0o755)
            undo.callback(os.rmdir, path)
            kernel.mount("asyncrl", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
            undo.callback(kernel.unmount, path)
            tree = os.path.join(path, "tree")
            os.mkdir(tree, 0o755)
            if uid is not None:
                os.chown(tree, uid, uid)
            directory = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield directory, path
            finally:
                os.close(directory)
            undo.pop_all()

    def _keep(self, layer: Layer) -> Layer:
        self.by_name[layer.name] = layer
        return layer

    def overlay(self, layer: Layer, target: str, upper: str | None, work: str | None) -> None:
        """Mount the files of `layer` at `target`, written to in `upper`; read-only without one. Raises OSError."""
        chain = layer.chain()
        if upper is None and len(chain) == 1:
            kernel.mount(layer.tree, target, None, kernel.MS_BIND)
            return
        options = "lowerdir=" + ":".join(one.tree for one in chain)
        if upper is not None:
            options += f",upperdir={upper},workdir={work}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | (0 if upper is not None else kernel.MS_RDONLY)
        # by root a renamed directory is noted as such; in a user namespace the renamer is told to copy it (EXDEV)
        options += ",redirect_dir=on,index=off,metacopy=off" if self.is_root else ",userxattr"
        kernel.mount("asyncrl", target, "overlay", flags, options)

    def let_go(self, layer: Layer) -> None:
        """Give up one hold; with the last one the layer is removed."""
        layer.held -= 1
        if layer.held:
            return
        kernel.unmount(layer.path)
        os.rmdir(layer.path)
        for one in layer.below:
            self.let_go(one)


class _Copy:
    """Copies a tree that its owner may be changing: by descriptors, no link followed, nothing that blocks opened.

    It takes no more room than the original, since holes stay holes and names of one file stay names of one file.
    """

    def __init__(self, target: int) -> None:
        self.num_bytes = 0
        self.num_files = 0
        self._root = target
        self._above: list[str] = []
        self._linked: dict[int, str] = {}
        """Inode of a file with several names -> the path of its copy."""

    def directory(self, source: int, target: int) -> None:
        self._attributes(source, target)
        if len(self._above) > _MAX_NESTED:
            raise safe_files.UnsafePathError(f"directories are nested more than {_MAX_NESTED} deep")
        for name in os.listdir(source):
            self._entry(name, source, target)

    def _entry(self, name: str, source: int, target: int) -> None:
        try:
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            mode = status.st_mode
            self.num_files += 1
            if stat.S_ISDIR(mode):
                self._below(name, source, target, status)
                return
            if stat.S_ISREG(mode):
                self._file(name, source, target, status)
                return
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            else:  # a pipe, a socket, or the mark that something below was removed: device 0, 0
                os.mknod(name, mode, 0, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            return  # removed meanwhile
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise  # these three: it became something else meanwhile

    def _below(self, name: str, source: int, target: int, status: os.stat_result) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(name, flags, dir_fd=source)
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            made = os.open(name, flags, dir_fd=target)
            self._above.append(name)
            try:
                self.directory(opened, made)
                os.fchown(made, status.st_uid, status.st_gid)
                os.fchmod(made, stat.S_IMODE(status.st_mode))
            finally:
                self._above.pop()
                os.close(made)
        finally:
            os.close(opened)

    def _file(self, name: str, source: int, target: int, status: os.stat_result) -> None:
        path = "/".join([*self._above, name])
        if status.st_nlink > 1 and len(path) < _MAX_PATH:
            if first := self._linked.get(status.st_ino):
                os.link(first, name, src_dir_fd=self._root, dst_dir_fd=target)
                return
            self._linked[status.st_ino] = path
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                return
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
            try:
                self._content(opened, made)
                os.fchown(made, status.st_uid, status.st_gid)
                os.fchmod(made, stat.S_IMODE(status.st_mode))
                os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))  # build tools and Python compare times
            finally:
                os.close(made)
        finally:
            os.close(opened)

    def _content(self, source: int, target: int) -> None:
        """Copy what is there and skip the holes, so that a sparse file stays one."""
        size = os.fstat(source).st_size
        os.ftruncate(target, size)
        end = 0
        while end < size:
            try:
                start = os.lseek(source, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            end = os.lseek(source, start, os.SEEK_HOLE)
            os.lseek(source, start, os.SEEK_SET)
            os.lseek(target, start, os.SEEK_SET)
            left = end - start
            while left > 0 and (sent := os.sendfile(target, source, None, min(left, _BLOCK))):
                left -= sent
                self.num_bytes += sent

    def _attributes(self, source: int, target: int) -> None:
        """Copy what the overlay has noted of a directory, such as that it hides the one below."""
        for name in os.listxattr(source):
            if name.startswith(_OVERLAY_NAMES) and not name.endswith(".origin"):
                os.setxattr(target, name, os.getxattr(source, name))
