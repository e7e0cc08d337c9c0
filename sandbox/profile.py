"""The stage and the arguments of the hardened bubblewrap profile. Standard library only.

The stage is a small tmpfs in the launcher's own mount namespace. It holds what a sandbox is built from, at paths that
an unprivileged user can reach wherever the originals lie, and the writable directories of the open sandboxes. Nobody
else sees it, and it goes away with its last process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.sandbox import kernel

_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/tmp")
_STAGE_BYTES = 512 * 2**20  # an upper bound; only a copied interpreter needs more than 1 MiB
_PASSWD = "root:x:0:0:root:/:/bin/sh\nagent:x:1000:1000:agent:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"
_BIND_READ_ONLY = ("/etc/alternatives", "/etc/ld.so.cache")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "site-packages", "test", "tests", "*.a")
WORK = "/task"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the launcher has put things."""

    root: str
    bubblewrap: str
    python_source: str | None
    """What is bound over `python_prefix` inside; None where Python comes with /usr."""
    python_prefix: str | None
    hidden: tuple[str, ...]
    """Directories that are shown empty."""


def build_stage(bubblewrap: Sequence[str], python_prefix: str | None, hidden: Sequence[str], uid: int | None) -> Stage:
    """Enter a mount namespace of this process's own and fill the stage.

    Args: the bubblewrap program and the directories beside it that it needs; the prefix of an interpreter outside /usr;
    directories to be shown empty; the unprivileged user that has to reach both, or None for the present one.
    Raises: OSError.
    """
    _enter_namespace()
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (python_prefix,) if path is not None}
    tools = [(os.path.basename(path), _read_tree(path)) for path in bubblewrap[1:]]
    with open(bubblewrap[0], "rb") as file:
        program = file.read()
    kernel.mount("", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = next(path for path in _MOUNT_POINTS if os.path.isdir(path))
    options = f"size={_STAGE_BYTES},mode=755"
    kernel.mount("asyncrl", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for name in ("box", "layer", "tools/bin/bin", "etc/alternatives"):
        os.makedirs(os.path.join(root, name))
    path = os.path.join(root, "tools/bin/bin/bwrap")
    _write(path, program, 0o755)
    for name, files in tools:
        os.mkdir(os.path.join(root, "tools", name))
        for file_name, content in files:
            _write(os.path.join(root, "tools", name, file_name), content, 0o755)
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", "127.0.0.1 localhost\n::1 localhost\n")):
        _write(os.path.join(root, "etc", name), text.encode(), 0o644)
    _write(os.path.join(root, "etc", "ld.so.cache"), b"", 0o644)
    return Stage(
        root=root,
        bubblewrap=path if bubblewrap[1:] else bubblewrap[0],
        python_source=None if python_prefix is None else _bring_python(root, sources[python_prefix], uid),
        python_prefix=python_prefix,
        hidden=tuple(hidden),
    )


def _enter_namespace() -> None:
    if os.geteuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        return
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    # the user maps to itself: the launcher may mount until it starts a program, which then has no privilege left
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _read_tree(path: str) -> list[tuple[str, bytes]]:
    files = []
    for entry in os.scandir(path):
        if entry.is_file():
            with open(entry.path, "rb") as file:
                files.append((entry.name, file.read()))
    return files


def _write(path: str, content: bytes, mode: int) -> None:
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)


def _bring_python(root: str, source: int, uid: int | None) -> str:
    """Bind the interpreter's prefix below the stage, or copy it where the unprivileged user may not enter it."""
    target = os.path.join(root, "python")
    os.mkdir(target)
    entered = os.path.join(f"/proc/self/fd/{source}", "bin")
    closed = uid is not None and any(
        os.stat(path).st_mode & 0o005 != 0o005 for path in (os.path.dirname(entered), entered)
    )
    if not closed:
        kernel.mount(f"/proc/self/fd/{source}", target, None, kernel.MS_BIND)
    else:
        shutil.copytree(f"/proc/self/fd/{source}", target, symlinks=True, ignore=_NOT_COPIED, dirs_exist_ok=True)
        for path, names, files in os.walk(target):
            for name in [".", *names, *files]:
                full = os.path.join(path, name)
                if not os.path.islink(full):
                    os.chmod(full, 0o755)
    os.close(source)
    return target


def arguments(
    stage: Stage, box: str, work: str, binds: Sequence[tuple[str, str, bool]], seccomp: int, status: int
) -> bytes:
    """Return bubblewrap's options, NUL separated, for `--args`.

    Args: the sandbox's directory on the stage; where its working directory appears; further places (where one appears,
    where it lies, whether it is written to); the descriptors of the filter (used up by one start) and of the status.
    """
    options = [
        "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
        "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp",
        "--setenv", "LANG", "C.UTF-8",
        "--cap-drop", "ALL", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000",
        "--ro-bind", "/usr", "/usr",
    ]  # fmt: skip
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = f"/{name}"
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    options += ["--ro-bind", f"{stage.root}/etc", "/etc"]
    for path in _BIND_READ_ONLY:
        options += ["--ro-bind-try", path, path]
    python = [] if stage.python_source is None else ["--ro-bind", stage.python_source, str(stage.python_prefix)]
    hidden = [option for path in stage.hidden for option in ("--tmpfs", path, "--remount-ro", path)]
    options += [
        "--proc", "/proc", "--ro-bind", "/dev/null", "/proc/cmdline", "--dev", "/dev",
        "--bind", f"{box}/tmp", "/tmp", "--bind", f"{box}/shm", "/dev/shm", "--bind", f"{box}/task", work,
        *[option for place, source, write in binds for option in ("--bind" if write else "--ro-bind", source, place)],
        *python, *hidden,
        # after the binds: without it the agent could fill the memory behind / and /dev, which have no size of their own
        "--remount-ro", "/dev", "--remount-ro", "/",
        "--chdir", work, "--seccomp", str(seccomp), "--json-status-fd", str(status),
    ]  # fmt: skip
    return b"".join(os.fsencode(option) + b"\0" for option in options)
