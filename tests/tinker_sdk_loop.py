"""A loop as people write them with Tinker's own SDK; it knows nothing of asyncrl.

TINKER_BASE_URL=http://127.0.0.1:8797 TINKER_API_KEY=tml-TOKEN python tinker_sdk_loop.py
"""

from __future__ import annotations

import os
import sys

if not os.environ.get("TINKER_BASE_URL", "").startswith("http://127.0.0.1:"):
    sys.exit("TINKER_BASE_URL must name a service of this machine: without it the SDK speaks to its makers' own")

import tinker
from tinker import types

TEXT = [256, *b"pack my box with jugs", 257]


def supervised() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:-1]),
        loss_fn_inputs={"target_tokens": TEXT[1:], "weights": [1.0] * (len(TEXT) - 1)},
    )


def main() -> None:
    service = tinker.ServiceClient()
    capabilities = tinker.RestClient().get_server_capabilities().result()
    (base,) = [model.model_name for model in capabilities.supported_models]
    trainer = service.create_lora_training_client(base_model=base, rank=8, seed=1).result()
    info = trainer.get_info()
    assert (info.lora_rank, info.model_data.model_name) == (8, base)
    losses = []
    for _ in range(60):
        passed = trainer.forward_backward([supervised()], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:max"] > 0
    assert losses[-1] < losses[0] / 10, losses
    (output,) = trainer.forward([supervised()], "cross_entropy").result().loss_fn_outputs
    assert output["logprobs"].shape == [len(TEXT) - 1]

    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([256])
    greedy = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=60, temperature=0.0)).result()
    assert greedy.sequences[0].tokens == TEXT[1:]
    assert greedy.sequences[0].stop_reason == "stop"
    drawn = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=5, seed=1)).result().sequences
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([256, *one.tokens[:-1]]),
            loss_fn_inputs={
                "target_tokens": one.tokens, "logprobs": one.logprobs, "advantages": [0.5 - index] * len(one.tokens)
            },
        )
        for index, one in enumerate(drawn)
    ]  # fmt: skip
    for loss, options in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
    ):
        found = trainer.forward_backward(data, loss, loss_fn_config=options).result()
        assert len(found.loss_fn_outputs) == 4
    trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    prompt_logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    assert prompt_logprobs[0] is None
    assert sum(prompt_logprobs[1:]) > -losses[0] / 10

    saved = trainer.save_state("sdk").result().path
    rest = trainer.forward([supervised()], "cross_entropy").result().metrics["loss:sum"]
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    assert again.forward([supervised()], "cross_entropy").result().metrics["loss:sum"] == rest
    named = trainer.save_weights_for_sampler("sdk-sampler").result().path
    other = service.create_sampling_client(model_path=named).result()
    assert other.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result().sequences[0].tokens
    plain = service.create_sampling_client(base_model=base).result()
    assert plain.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result().sequences[0].tokens
    try:
        trainer.forward_backward([supervised()], "dro").result()
    except tinker.RequestFailedError as error:
        refusal = str(error)
    else:
        raise AssertionError("dro is not offered")
    if "must be one of" not in refusal:
        raise AssertionError(refusal)
    assert trainer.forward([supervised()], "cross_entropy").result().metrics["loss:sum"] == rest, "and all goes on"
    paths = [one.tinker_path for one in tinker.RestClient().list_checkpoints(trainer.model_id).result().checkpoints]
    assert {saved, named} <= set(paths), paths
    print("all of it")


if __name__ == "__main__":
    main()
