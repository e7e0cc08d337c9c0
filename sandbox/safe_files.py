"""Files of a directory that an agent may have filled with traps: links, pipes, devices, races. Standard library only.

Every function takes the open directory and a path below it, and never follows a symbolic link.
"""

from __future__ import annotations

import errno
import os
import stat

from asyncrl.sandbox.kernel import open_beneath

_MAX_NAMES = 65536  # what list() returns at most; a sandbox's own limit on files is far below


class UnsafePathError(Exception):
    """The path leads out of the directory, or is not a plain file."""


_UNSAFE = (errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.EAGAIN)


def _clean(path: str) -> str:
    if "\0" in path:
        raise UnsafePathError(f"{path!r} holds a NUL byte")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise UnsafePathError(f"{path!r} holds half a character, which no name of a file can") from None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise UnsafePathError(f"{path!r} must be relative and without '..'")
    return "/".join(parts) or "."


def _open(directory: int, path: str, flags: int, mode: int = 0) -> int:
    try:
        return open_beneath(directory, path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno in _UNSAFE:
            raise UnsafePathError(f"{path!r} is or passes a link, a pipe or a way out ({error.strerror})") from None
        raise


def _require_plain(descriptor: int, path: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePathError(f"{path!r} is not a regular file")
    if status.st_nlink != 1:
        raise UnsafePathError(f"{path!r} has {status.st_nlink} hard links, allowed is 1")
    return status


def read_file(directory: int, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError, or UnsafePathError (also where it is larger)."""
    path = _clean(path)
    descriptor = _open(directory, path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb", buffering=0, closefd=True) as file:
        size = _require_plain(descriptor, path).st_size
        if size > max_bytes:
            raise UnsafePathError(f"{path!r} has {size} bytes, allowed are {max_bytes}")
        chunks = []
        left = max_bytes + 1  # one more, to see that it did not grow meanwhile
        while left > 0 and (chunk := file.read(left)):
            chunks.append(chunk)
            left -= len(chunk)
    if left == 0:
        raise UnsafePathError(f"{path!r} grew beyond the {max_bytes} bytes allowed while it was read")
    return b"".join(chunks)


def write_file(directory: int, path: str, data: bytes, owner: int | None, *, executable: bool = False) -> None:
    """Write a regular file, with its directories where they are missing, owned by user `owner`.

    Raises: OSError (ENOSPC where the disk is full), or UnsafePathError.
    """
    path = _clean(path)
    parent, _, name = path.rpartition("/")
    holder = _make_directories(directory, parent, owner)
    try:
        descriptor = _open(holder, name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            _require_plain(descriptor, path)
            os.ftruncate(descriptor, 0)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if owner is not None:
                os.fchown(descriptor, owner, owner)
            if executable:
                os.fchmod(descriptor, 0o755)
        finally:
            os.close(descriptor)
    finally:
        os.close(holder)


def _make_directories(directory: int, path: str, owner: int | None) -> int:
    """Return an open directory `path`, made where it was missing."""
    holder = os.dup(directory)
    for part in path.split("/") if path else ():
        try:
            try:
                os.mkdir(part, 0o755, dir_fd=holder)
                made = True
            except FileExistsError:
                made = False
            below = _open(holder, part, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(holder)
        holder = below
        if made and owner is not None:
            os.fchown(holder, owner, owner)
    return holder


def list_directory(directory: int, path: str) -> list[str]:
    """Return the names in a directory, sorted. Raises OSError, or UnsafePathError."""
    descriptor = _open(directory, _clean(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)
    if len(names) > _MAX_NAMES:
        raise UnsafePathError(f"{path!r} has {len(names)} names, allowed are {_MAX_NAMES}")
    return names


def walk(directory: int, path: str, max_entries: int) -> list[tuple[str, str, int]]:
    """Return path, kind and size of all below `path`, sorted; nothing is opened but directories.

    What is removed meanwhile is left out. Raises OSError, or UnsafePathError (also where there are more).
    """
    top = _clean(path)
    os.close(_open(directory, top, os.O_RDONLY | os.O_DIRECTORY))
    found: list[tuple[str, str, int]] = []
    left = [top]  # by path, since an agent may make more directories than there are descriptors
    while left:
        here = left.pop()
        prefix = "" if here == "." else here + "/"
        try:
            current = _open(directory, here, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError, UnsafePathError):
            continue  # it was removed or became something else since it was listed
        try:
            for name in os.listdir(current):
                if len(found) == max_entries:
                    raise UnsafePathError(f"{path!r} holds more than the {max_entries} files allowed")
                try:
                    status = os.stat(name, dir_fd=current, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    left.append(prefix + name)
                found.append((prefix + name, _kind(status.st_mode), status.st_size))
        finally:
            os.close(current)
    return sorted(found)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"
