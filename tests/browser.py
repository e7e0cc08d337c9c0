"""A real browser without a window: what it shows, and what it complains of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """Return a browser's path; skip the test, with the reason, where there is none."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("needs a headless browser: apt-get install chromium")


def look(browser: str, url: str, picture: Path, *, height: int, dark: bool = False) -> str:
    """Write what the browser shows as a PNG; return what it wrote into its console."""
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    argv += [f"--user-data-dir={picture.parent / 'profile'}", f"--window-size=1280,{height}", f"--screenshot={picture}"]
    argv += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run([*argv, url], capture_output=True, text=True, timeout=120, check=False)
    assert picture.exists(), done.stderr[-2000:]
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def rows_with(picture: Path, colour: str) -> int:
    """Return in how many rows of a picture a colour is seen."""
    wanted = bytes(int(colour[at : at + 2], 16) for at in (1, 3, 5))
    image = Image.open(picture).convert("RGB")
    data, width = image.tobytes(), image.width * 3
    return sum(wanted in data[row * width : (row + 1) * width] for row in range(image.height))
