"""Times TRL's GRPOTrainer on a batch, in a process of its own: the peer of `asyncrl bench step`.

    python -m asyncrl.bench.trl_step '{"model": ..., "prompts": [...], "steps": 3, ...}'

TRL generates by transformers and trains in bfloat16 on the CPU, as it does without a GPU. Prints one JSON line last.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class _Clock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step and the completions' mean length in tokens."""
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        # Half of a group is rewarded: grading costs nothing here, and every group has something to learn from.
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(index % 2) for index in range(len(completion_ids))]

    groups, size = settings["groups_per_step"], settings["group_size"]
    prompts = [{"prompt": text} for text in settings["prompts"]]
    with tempfile.TemporaryDirectory(prefix="asyncrl-trl-") as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=groups,
            num_generations=size,
            max_completion_length=settings["max_tokens"],
            temperature=1.0,
            learning_rate=1e-5,
            max_steps=settings["steps"],
            use_cpu=True,
            bf16=False,  # weights are bfloat16 already; mixed precision on top would only add casts
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": torch.bfloat16},
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=settings["seed"],
        )
        clock = _Clock()
        trainer = GRPOTrainer(
            model=settings["model"],
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(prompts),
            callbacks=[clock],
        )
        clock.times = [time.perf_counter()]
        trainer.train()
    seconds = [after - before for before, after in pairwise(clock.times)]
    return {"seconds": seconds, "mean_tokens": sum(lengths) / len(lengths), "completions": len(lengths)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
