"""Tries the NCCL transport on two GPUs of this host: a vLLM server on the second takes versions from the first.

    python -m asyncrl.weight_sync.check_nccl MODEL [--versions 3] [--port 8000] [--rendezvous-port 29600]

MODEL is a directory with safetensors files, small enough for one GPU. Each version is the model with other weights, and
for each is printed how long it took. Ends with 0 if the engine holds every version as it was sent, with 1 if not, and
with 2 where there are no two GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.plugin import NCCL_BACKEND

_START_S = 600.0  # a server that compiles kernels for the first time
_INTERVAL_S = 1.0  # a server that is starting offers nothing to wait for but its port


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.weight_sync.check_nccl", description=(__doc__ or ""))
    parser.add_argument("model", type=Path)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rendezvous-port", type=int, default=29600)
    options = parser.parse_args(arguments)
    if not list(options.model.glob("*.safetensors")):
        print(f"{options.model} has no *.safetensors file", file=sys.stderr)
        return 2
    import torch

    if torch.cuda.device_count() < 2:
        print(f"NCCL needs a GPU for each side: two, and torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    server = subprocess.Popen(_command(options.model, options.port), env=_environment())
    try:
        _wait_healthy(server, f"http://127.0.0.1:{options.port}")
        return _send(options)
    except WeightSyncError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        server.terminate()
        server.wait()


def _command(model: Path, port: int) -> list[str]:
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager"]
    argv += ["--weight-transfer-config", f'{{"backend": "{NCCL_BACKEND}"}}']
    return [*argv, "--worker-extension-cls", "asyncrl.weight_sync.vllm_engine.WorkerReport"]


def _environment() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}


def _wait_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(_INTERVAL_S)
    raise WeightSyncError(f"the server at {url} did not become healthy (exit code {server.poll()})")


def _send(options: argparse.Namespace) -> int:
    import torch
    from safetensors.torch import load_file

    from asyncrl.weight_sync.nccl import HttpEngines, NcclPublisher

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(options.model.glob("*.safetensors")):
        tensors |= load_file(file, device="cuda:0")
    engines = HttpEngines([f"http://127.0.0.1:{options.port}"])
    publisher = NcclPublisher(
        run_id="check", engines=engines, num_workers=engines.num_workers(), port=options.rendezvous_port
    )
    with publisher:
        for version in range(1, options.versions + 1):
            for tensor in tensors.values():
                tensor.mul_(1.0 + 2.0**-7)  # one step of a bfloat16 value: every element moves
            started = time.monotonic()
            manifest = publisher.publish(tensors, version)
            seconds = time.monotonic() - started
            rate = manifest.num_bytes / seconds / 2**30
            print(f"version {version}: {manifest.num_bytes} bytes in {seconds:.3f} s ({rate:.2f} GiB/s), verified")
    engines.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
