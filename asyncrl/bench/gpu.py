"""What a GPU makes of the learner: speed, memory, attention, packing, loss and copies, with random weights.

Needs torch alone and no model. Timings are medians over rounds, after one that is not counted. What does not fit in the
device's memory says `out_of_memory` in place of figures; what was not begun within the time is in `left_out`.

The report, as `--json` writes it:

| key | what |
|---|---|
| settings | as `asyncrl.bench.gpu_settings.GpuBench` names them |
| device.name, .capability, .memory_bytes, .cuda, .torch | the card; the last four are null or missing on a CPU |
| device.product_flops | operations a second that one large bfloat16 product reaches, here and now |
| device.stated_flops | what the vendor states for the card, null where it is not known |
| shapes.NAME.shape | layers, widths and batch sizes |
| ....step.seconds, .peak_bytes | of whole optimizer steps, advantages and metrics included |
| ....step.tokens_per_second, .num_tokens, .num_parameters, .grad_norm | |
| ....step.flops, .flops_per_second | what an ideal learner needs: recomputed activations and head are not counted |
| ....step.utilisation, .utilisation_of_product | flops_per_second over stated_flops (null without) and product_flops |
| ....step.loss_seconds, .diagnostics_seconds | on the same tokens, alone, on the CPU, where diagnostics always are |
| ....head.tiled, .whole | the LM head's forward and backward, in tiles and with whole float32 logits |
| ....head.logprob_difference_max, .memory_of_whole | nats; tiled peak over whole peak |
| ....attention.choices.NAME | seconds, forward_seconds, peak_bytes, and relative differences from float64 |
| ....attention.choices.NAME.left_out | why a kernel does not run here |
| ....packing.packed, .padded | forward and backward of ragged segments; padded to the longest with PyTorch's SDPA |
| ....sharing.shared, .apart | the same of groups with a common prompt, read once a group, or once a segment |
| ....gradient_relative_difference | of the two gradients, each scaled to norm 1 |
| ....copies.copies.NAME.bytes_per_second, .of_device_to_device | a version of the weights, in one buffer |
| ....copies.copies.tensor_by_tensor | the same on the device, one tensor after the other |
| left_out | pieces that were not begun, as "shape: piece" |
| seconds | that all of it took |
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from asyncrl.bench.gpu_attention import compare_attention
from asyncrl.bench.gpu_copies import measure_copies
from asyncrl.bench.gpu_device import Device
from asyncrl.bench.gpu_model import GpuModel
from asyncrl.bench.gpu_settings import SHAPES, GpuBench, Shape
from asyncrl.bench.timing import Report

PIECES = ("step", "packing", "sharing", "head", "copies", "attention")
"""In the order in which they are measured, for each shape."""


def bench_gpu(bench: GpuBench, *, say: Callable[[str], None]) -> Report:
    """Return the report that this module describes; `say` is told what runs now.

    Raises: ConfigError where there is no such device.
    """
    began = time.monotonic()
    device = Device(bench.device, rounds=bench.rounds)
    say("how fast a large product is")
    report: Report = {"settings": asdict(bench), "device": device.describe(), "shapes": {}}
    left_out = []
    for name in bench.shapes:
        found: Report = {"shape": asdict(SHAPES[name])}
        model: GpuModel | None = None
        for piece in PIECES:
            if time.monotonic() - began > bench.limit_s:
                left_out.append(f"{name}: {piece}")
                continue
            say(f"{name}: {piece}")
            if model is None and piece != "attention":
                model = GpuModel(device, SHAPES[name])
            if piece == "attention":
                model = None
                _release(device)
            found[piece] = _piece(piece, device, SHAPES[name], model)
        model = None
        _release(device)
        report["shapes"][name] = found
        if "flops_per_second" in found.get("step", {}):
            found["step"] |= _utilisation(found["step"], report["device"])
    return {**report, "left_out": left_out, "seconds": time.monotonic() - began}


def _piece(piece: str, device: Device, shape: Shape, model: GpuModel | None) -> Report:
    if piece == "attention":
        return compare_attention(device, shape)
    assert model is not None
    if piece == "copies":
        return measure_copies(device, model.policy.tensors())
    found: Report = getattr(model, piece)()
    return found


def _release(device: Device) -> None:
    """Give back what the last model held, so that the next one's peaks are its own."""
    gc.collect()
    if device.is_gpu:
        torch.cuda.empty_cache()


def _utilisation(step: Report, device: Report) -> dict[str, float | None]:
    reached, stated = step["flops_per_second"], device["stated_flops"]
    return {
        "utilisation": reached / stated if stated else None,
        "utilisation_of_product": reached / device["product_flops"],
    }


def table(report: Report) -> Table:
    """Return the figures for a person."""
    device = report["device"]
    shown = Table(title=f"the learner on {device['name']}, a product at {device['product_flops'] / 1e12:.3g} TFLOP/s")
    for column in ("what", "seconds", "peak, MiB", "figure"):
        shown.add_column(column)
    for name, found in report["shapes"].items():
        for piece in PIECES:
            for row in _rows(piece, found.get(piece, {})):
                shown.add_row(f"{name}: {row[0]}", *row[1:])
        shown.add_section()
    return shown


def _rows(piece: str, found: Report) -> list[tuple[str, ...]]:
    if not found:
        return []
    if piece == "step":
        figure = ""
        if "seconds" in found:
            share = found["utilisation"] or found["utilisation_of_product"]
            figure = f"{found['tokens_per_second']:,.0f} tokens/s, {share:.1%} utilisation"
        return [_row("optimizer step", found, figure)]
    if piece == "copies":
        return [(f"copy, {n}", "", "", f"{c['bytes_per_second'] / 1e9:.3g} GB/s") for n, c in found["copies"].items()]
    if piece == "attention":
        return [_row(f"attention, {name}", c, _error(c)) for name, c in found["choices"].items()]
    named = {"packing": ("packed", "padded"), "sharing": ("shared", "apart"), "head": ("tiled", "whole")}[piece]
    return [_row(f"{piece}, {name}", found[name], "") for name in named]


def _row(words: str, figures: dict[str, Any], figure: str) -> tuple[str, ...]:
    if "seconds" not in figures:
        return words, "", "", figures.get("left_out") or f"does not fit: {figures['out_of_memory']}"
    return words, f"{figures['seconds']:.4f}", f"{figures['peak_bytes'] / 2**20:,.0f}", figure


def _error(figures: dict[str, Any]) -> str:
    found = figures.get("result_relative_difference")
    return "" if found is None else f"{found:.2g} from float64"
