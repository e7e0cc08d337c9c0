"""What a Dockerfile asks for that can be had without building an image: a directory, variables, copied files.

Everything else is a `NeedsImageError`. A RUN line is passed over only where it provably changes nothing here: what it
would install is installed, what it would make is made. Nothing is guessed: a task whose image would hold more than its
sandbox would be unsolvable, and nobody would see why.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from asyncrl.coding.sets.task_files import TaskFiles
from asyncrl.errors import ConfigError

BASE_IMAGES = (
    "ubuntu",
    "debian",
    "python",
    "ghcr.io/laude-institute/t-bench/ubuntu-24-04",
    "ghcr.io/laude-institute/t-bench/python-3-13",
)
"""Images that hold an operating system with Python and no more, for which this machine's /usr may stand."""

_WITHOUT_EFFECT = {"CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "SHELL", "HEALTHCHECK", "USER", "ONBUILD"}
_PATH = "/usr/local/bin:/usr/bin:/bin"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_APT_FLAGS_WITH_VALUE = {"-o", "-t", "-c"}


class NeedsImageError(ConfigError):
    """What a task asks for must be built or pulled first."""


@dataclass(slots=True, kw_only=True)
class Recipe:
    """What a Dockerfile comes to."""

    work: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Absolute path -> content."""
    executable: set[str] = field(default_factory=set)
    directories: set[str] = field(default_factory=set)
    """Absolute paths that are made, and may be empty."""
    provided: set[str] = field(default_factory=set)
    """Python packages that it would install, and that are said to be here."""


@cache
def installed_packages(status: str = "/var/lib/dpkg/status") -> frozenset[str]:
    """Return the names of the Debian packages that are installed on this machine; empty where there are none."""
    try:
        text = Path(status).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = set()
    for paragraph in text.split("\n\n"):
        if "\nStatus: install ok installed" in paragraph and paragraph.startswith("Package: "):
            found.add(paragraph.partition("\n")[0].removeprefix("Package: ").strip())
    return frozenset(found)


def plain_name(requirement: str) -> str:
    """Return a package's name as all of its spellings have it, without versions and extras."""
    return re.split(r"[=<>!~\[;@ ]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def read_dockerfile(
    text: str,
    context: TaskFiles,
    *,
    base_images: Sequence[str] = BASE_IMAGES,
    provided: Collection[str] = (),
    has_package: Callable[[str], bool] = lambda name: name in installed_packages(),
) -> Recipe:
    """Return what `text` asks for, with the files that it copies from `context`.

    Args: `base_images` are names without tags; `provided` are packages that somebody says are here, and `has_package`
    tells whether a Debian package is installed.
    Raises: NeedsImageError saying which line must be built.
    """
    reader = _Reader(context, base_images, provided, has_package)
    for line in _lines(text):
        word, _, rest = line.partition(" ")
        reader.take(word.upper(), rest.strip(), line)
    if not reader.has_base:
        raise NeedsImageError("the Dockerfile has no FROM")
    return reader.recipe


def _lines(text: str) -> list[str]:
    """Return the instructions, each on one line, without comments."""
    joined: list[str] = []
    continued = ""
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            continued += line.rstrip()[:-1] + " "
            continue
        joined.append((continued + line).strip())
        continued = ""
    if continued.strip():
        joined.append(continued.strip())
    return joined


class _Reader:
    """Takes one instruction after the other."""

    def __init__(
        self,
        context: TaskFiles,
        base_images: Sequence[str],
        provided: Collection[str],
        has_package: Callable[[str], bool],
    ) -> None:
        self.recipe = Recipe()
        self.has_base = False
        self._context = context
        self._base_images = base_images
        self._provided = {plain_name(name) for name in provided}
        self._has_package = has_package
        self._arguments: dict[str, str] = {}

    def take(self, word: str, rest: str, line: str) -> None:
        """Follow an instruction. Raises: NeedsImageError."""
        if word in _WITHOUT_EFFECT:
            return
        if "<<" in line and word in ("RUN", "COPY", "ADD"):
            raise NeedsImageError(f"{line!r} must be built")
        match word:
            case "FROM":
                self._base(rest)
            case "ARG":
                name, _, value = rest.partition("=")
                self._arguments.setdefault(name.strip(), self._expanded(value.strip().strip("\"'")))
            case "ENV":
                self._variables(rest)
            case "WORKDIR":
                self.recipe.work = posixpath.normpath(
                    posixpath.join(self.recipe.work, self._expanded(rest.strip("\"'")))
                )
                self.recipe.directories.add(self.recipe.work)
            case "COPY" | "ADD":
                self._copy(rest, line)
            case "RUN":
                self._run(rest)
            case "ENTRYPOINT" if rest.replace(" ", "") in ("[]", '[""]'):
                return
            case _:
                raise NeedsImageError(f"{line!r} must be built")

    def _base(self, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        image = self._expanded(words[0]) if words else ""
        name = re.sub(r"(:[^/:]*)?(@.*)?$", "", image).removeprefix("docker.io/")
        name = name.removeprefix("public.ecr.aws/docker/").removeprefix("library/")
        if self.has_base or len(words) > 1:
            raise NeedsImageError("it is built in several stages")
        if name not in self._base_images:
            raise NeedsImageError(
                f"it is FROM {image}, for which this machine's /usr cannot stand (base_images are "
                f"{', '.join(self._base_images)})"
            )
        self.has_base = True

    def _variables(self, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise NeedsImageError(f"ENV {rest!r} cannot be read: {error}") from None
        if words and "=" not in words[0]:  # the old form, ENV NAME the whole rest
            name, _, value = rest.partition(" ")
            self.recipe.variables[name] = self._expanded(value.strip())
            return
        pairs = [word.partition("=") for word in words]
        self.recipe.variables.update({name: self._expanded(value) for name, _, value in pairs})

    def _expanded(self, text: str) -> str:
        known = {"PATH": _PATH, "HOME": "/tmp", **self._arguments, **self.recipe.variables}
        return _VARIABLE.sub(lambda found: known.get(found[1] or found[3]) or found[2] or "", text)

    # --- copying ----------------------------------------------------------------------------------------------

    def _copy(self, rest: str, line: str) -> None:
        flags, words = _flags(_words(rest, line))
        if set(flags) - {"--chown", "--chmod", "--link"} or len(words) < 2:
            raise NeedsImageError(f"{line!r} must be built")
        *sources, target = [self._expanded(word) for word in words]
        is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.recipe.work, target))
        may_run = flags.get("--chmod", "").lstrip("0")[:1] in ("5", "7")
        for source in sources:
            if "://" in source or (line[:3].upper() == "ADD" and re.search(r"\.(tar|tgz|tar\.\w+|zip)$", source)):
                raise NeedsImageError(f"{line!r} must be built")
            for path, inside in self._matching(source, line, is_folder):
                place = posixpath.join(target, inside) if inside else target
                self.recipe.files[place] = self._context.files[path]
                if may_run or path in self._context.executable:
                    self.recipe.executable.add(place)

    def _matching(self, source: str, line: str, is_folder: bool) -> list[tuple[str, str]]:
        """Return (path in the context, path below the target) of what a source names."""
        wanted = posixpath.normpath(source.lstrip("/") or ".")
        if wanted.startswith(".."):
            raise NeedsImageError(f"{line!r} leads out of the task's environment")
        if wanted == ".":
            return [(path, path) for path in self._context.files]
        found: list[tuple[str, str]] = []
        for path in self._context.files:
            parts, pattern = path.split("/"), wanted.split("/")
            if len(parts) < len(pattern) or not all(map(fnmatch.fnmatchcase, parts, pattern)):
                continue
            if len(parts) == len(pattern):
                found.append((path, parts[-1] if is_folder else ""))
            else:
                found.append((path, "/".join(parts[len(pattern) :])))
        if not found:
            raise NeedsImageError(f"{line!r} copies what the task's environment does not hold")
        return found

    # --- running ----------------------------------------------------------------------------------------------

    def _run(self, rest: str) -> None:
        if rest.startswith("["):
            raise NeedsImageError(f"'RUN {rest}' must be built")
        for command in re.split(r"&&|;", re.sub(r"^(--\w+=\S+\s+)+", "", rest)):
            if command.strip() and not self._changes_nothing(command.strip()):
                raise NeedsImageError(f"'RUN {command.strip()}' must be built")

    def _changes_nothing(self, command: str) -> bool:
        """Return whether a command's effect is here already, or was noted in the recipe."""
        if re.search(r"[|<>`&$()]", command.replace("/dev/null", "").replace("2>&1", "")):
            return False
        words = shlex.split(self._expanded(command))
        while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
            words.pop(0)
        match words:
            case [] | [":"] | ["true"] | ["set", *_]:
                return True
            case ["mkdir", "-p", *paths] | ["mkdir", *paths]:
                self.recipe.directories |= {
                    posixpath.normpath(posixpath.join(self.recipe.work, path)) for path in paths
                }
                return not any(path.startswith("-") for path in paths)
            case ["chmod", "+x" | "755" | "a+x" | "u+x", *paths]:
                full = {posixpath.normpath(posixpath.join(self.recipe.work, path)) for path in paths}
                self.recipe.executable |= full
                return full <= set(self.recipe.files)
            case ["rm", "-rf", *paths]:
                return all(path.startswith(("/var/lib/apt/lists", "/var/cache/apt")) for path in paths)
            case ["apt-get" | "apt", *arguments]:
                return self._is_installed(arguments)
            case ["pip" | "pip3", "install", *arguments] | ["python" | "python3", "-m", "pip", "install", *arguments]:
                plain = [word for word in arguments if not word.startswith("-")]
                self.recipe.provided |= {plain_name(word) for word in plain}
                return (
                    not {"-r", "-e", "-i"} & set(arguments) and {plain_name(word) for word in plain} <= self._provided
                )
        return False

    def _is_installed(self, arguments: Sequence[str]) -> bool:
        plain: list[str] = []
        iterator = iter(arguments)
        for word in iterator:
            if word in _APT_FLAGS_WITH_VALUE:
                next(iterator, None)
            elif not word.startswith("-"):
                plain.append(word)
        match plain:
            case ["update"] | ["clean"] | ["autoremove"] | ["autoclean"]:
                return True
            case ["install", *packages]:
                return all(self._has_package(name) or plain_name(name) in self._provided for name in packages)
        return False


def _words(rest: str, line: str) -> list[str]:
    flags = re.match(r"(--\S+\s+)*", rest)
    end = flags.end() if flags else 0
    if rest[end:].startswith("["):
        try:
            return [*rest[:end].split(), *map(str, json.loads(rest[end:]))]
        except ValueError:
            raise NeedsImageError(f"{line!r} cannot be read") from None
    return rest.split()


def _flags(words: Sequence[str]) -> tuple[Mapping[str, str], list[str]]:
    flags = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    return flags, [word for word in words if not word.startswith("--")]
