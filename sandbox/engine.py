"""podman or docker by its command line."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from asyncrl.errors import ConfigError, SandboxError

_CALL_S = 60.0  # an engine that starts many containers is slow; one that takes longer hangs
_HOST_IMAGE = "localhost/asyncrl-host:1"
_HOST_FOLDERS = ("usr", "etc", "tmp", "proc", "dev", "sys", "task", "run", "var")
_HOST_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A container engine that has answered."""

    program: str
    runtime: str
    """Empty for the engine's own."""

    @property
    def is_podman(self) -> bool:
        """Whether it takes podman's options, not docker's."""
        return os.path.basename(self.program) == "podman"

    @property
    def is_gvisor(self) -> bool:
        """Whether containers have a kernel of their own, so that their processes are none of this machine's."""
        return os.path.basename(self.runtime) == "runsc"

    def command(self, *words: str) -> list[str]:
        """Return the argument list of a command to the engine."""
        if self.is_podman and self.is_gvisor:
            # docker has these in its configuration; without a network of its own gVisor would want one to bridge to
            return [self.program, f"--runtime={self.runtime}", "--runtime-flag=network=none", *words]
        if words[0] == "run" and self.runtime:
            return [self.program, "run", f"--runtime={self.runtime}", *words[1:]]
        return [self.program, *words]

    async def call(self, *words: str, stdin: bytes = b"") -> str:
        """Return what a command printed. Raises SandboxError where it failed, or did not answer in time."""
        what = f"{self.program} {words[0]}"
        try:
            with trio.fail_after(_CALL_S):
                done = await trio.run_process(
                    self.command(*words), stdin=stdin, capture_stdout=True, capture_stderr=True, check=False
                )
        except trio.TooSlowError:
            raise SandboxError(
                f"`{what}` did not answer within {_CALL_S:.0f} s: see whether `{self.program} info` does"
            ) from None
        except OSError as error:
            raise SandboxError(f"`{what}` cannot be run: {error.strerror}") from None
        if done.returncode != 0:
            raise SandboxError(f"`{what}` failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
        return done.stdout.decode(errors="replace").strip()


async def find_engine(program: str, runtime: str) -> Engine:
    """Return an engine that answers. Raises ConfigError saying what to install or start."""
    names = [program] if program else ["podman", "docker"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise ConfigError(
            f"the sandbox backend 'container' needs {' or '.join(names)}: install it, or name another by engine "
            "([sandbox] engine)"
        )
    runtime = runtime or shutil.which("runsc") or ""
    engine = Engine(program=found, runtime=runtime)
    try:
        await engine.call("info")
    except SandboxError as error:
        raise ConfigError(f"the container engine does not answer: {error} ([sandbox] engine)") from None
    return engine


async def find_image(engine: Engine, image: str) -> tuple[str, Sequence[str]]:
    """Return the image, and the options that it needs beside; makes the empty one for "host".

    Raises: ConfigError where it is not there: pulling is not for the middle of a run.
    """
    name = _HOST_IMAGE if image == "host" else image
    try:
        await engine.call("image", "inspect", "--format", "{{.Id}}", name)
    except SandboxError as error:
        if image != "host":
            raise ConfigError(
                f"the image {image!r} is not here ({error}): `{engine.program} pull {image}` ([sandbox] image)"
            ) from None
        await engine.call("import", "-", name, stdin=_empty_image())
    if image != "host":
        return name, ()
    return name, ("--volume=/usr:/usr:ro", "--volume=/etc/alternatives:/etc/alternatives:ro")


def _empty_image() -> bytes:
    """Return an image's content: folders, and the links that lead into /usr."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in (*_HOST_FOLDERS, "etc/alternatives"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        for name in _HOST_LINKS:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
    return buffer.getvalue()
