"""What environments and trainers of Atropos are promised: the contract of atroposlib 0.4.0, and where it is mended."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from atropos_rig import ENVIRONMENT, REGISTRATION, Server, group, run, zipped

KEYS = {
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
}  # fmt: skip


def test_nothing_is_known_before_a_trainer_registers(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        assert await server.get("/") == {"message": "AtroposLib API"}
        assert await server.get("/info") == {"batch_size": -1, "max_token_len": -1}
        assert await server.get("/status") == {"current_step": 0, "queue_size": 0}
        assert await server.get("/wandb_info") == {"group": None, "project": None}
        error = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
        assert await server.get("/batch") == error
        assert (await server.get("/latest_example"))["tokens"] == []

    run(tmp_path, body)


def test_environments_wait_for_the_first_request_of_a_batch(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        waiting = {"status": "wait for trainer to start"}
        assert await server.post("/register-env", ENVIRONMENT) == waiting
        answer = await server.post("/register", REGISTRATION)
        assert answer.keys() == {"uuid"}
        assert answer["uuid"] < 2**128
        assert await server.post("/register-env", ENVIRONMENT) == waiting
        assert await server.get("/batch") == {"batch": None}
        assert await server.post("/register-env", ENVIRONMENT) == {
            "status": "success", "env_id": 0, "wandb_name": "sums_0", "checkpoint_dir": "/checkpoints",
            "starting_step": 0, "checkpoint_interval": 50, "num_steps": 400,
        }  # fmt: skip
        again = await server.post("/register-env", {**ENVIRONMENT, "desired_name": None})
        assert (again["env_id"], again["wandb_name"]) == (1, "environment_0")
        assert await server.get("/info") == {"batch_size": 4, "max_token_len": 64}
        assert await server.get("/wandb_info") == {"group": "group", "project": "project"}

    run(tmp_path, body)


def test_a_group_that_is_posted_comes_back_in_a_batch_with_all_keys(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        posted = group(7, my_attention_mask=[[1, 1, 0]] * 4)
        assert await server.post("/scored_data", posted) == {"status": "received"}
        assert await server.get("/status") == {"current_step": 0, "queue_size": 1}
        (found,) = (await server.get("/batch"))["batch"]
        assert found.keys() == KEYS | {"my_attention_mask"}  # what is unknown here may be known to a loss
        assert {name: value for name, value in found.items() if value is not None} == posted
        assert await server.get("/status") == {"current_step": 1, "queue_size": 0}
        assert (await server.get("/latest_example"))["tokens"] == posted["tokens"]

    run(tmp_path, body)


def test_groups_before_the_trainer_are_kept_for_it(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.post("/scored_data", group(7, env_id=None))
        await server.post("/register", REGISTRATION)
        assert await server.batch() == [7]

    run(tmp_path, body)


def test_batches_come_in_the_order_in_which_groups_were_posted(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({}, batch_size=8)
        for first in range(6):
            await server.post("/scored_data", group(first))
        assert [await server.batch() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], None]
        assert (await server.get("/status"))["current_step"] == 3  # batches that were lent, not those that could be

    run(tmp_path, body)


def test_any_mix_of_sizes_packs(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        for first, size in enumerate([3, 2, 1, 2, 4, 3]):
            assert await server.post("/scored_data", group(first, size)) == {"status": "received"}
        assert await server.batch() == [0, 2]
        assert await server.batch() == [1, 3]
        assert await server.batch() == [4]
        assert await server.batch() is None
        await server.post("/scored_data", group(6, 3))
        assert await server.batch() == [5]  # of 3: nothing fits beside it, and it is not left to wait for ever

    run(tmp_path, body)


def test_lists_of_groups_come_whole_or_not_at_all(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        received = {"status": "received", "groups_processed": 2}
        assert await server.post("/scored_data_list", [group(1), group(2)]) == received
        assert (await server.post("/scored_data_list", []))["groups_processed"] == 0
        broken = await server.post("/scored_data_list", [group(3), group(4, scores=[0.0])], status=422)
        assert broken["detail"][0]["loc"] == ["body", "1", "scores"]
        assert (await server.get("/status"))["queue_size"] == 2

    run(tmp_path, body)


def test_gzip_is_spoken_both_ways(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        posted = group(7, messages=[[{"role": "user", "content": "x" * 2000}]] * 4)
        answer = await server.client.post("/scored_data", content=zipped(posted), headers=headers)
        assert answer.json() == {"status": "received"}
        for broken in (b"no gzip", zipped(posted)[:-40]):
            refused = await server.client.post("/scored_data", content=broken, headers=headers)
            assert refused.status_code == 400
            assert "Invalid gzip payload" in refused.text
        async with server.client.stream("GET", "/batch", headers={"accept-encoding": "gzip"}) as answer:
            assert answer.headers["content-encoding"] == "gzip"
            raw = b"".join([part async for part in answer.aiter_raw()])
        assert json.loads(gzip.decompress(raw))["batch"][0]["messages"] == posted["messages"]

    run(tmp_path, body)


def test_the_status_of_an_environment_counts_as_the_contract_does(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({}, {"desired_name": "other", "weight": 3.0}, batch_size=64)
        for first in range(2):
            await server.post("/scored_data", group(first))
        await server.post("/scored_data", group(3, 5, env_id=1))
        assert await server.status_env(0) == {
            "current_step": 0,
            "queue_size": (8 + 5) // 4,
            "unallocated_fraction": 1.0,
            "self_queue_size": 2,
            "max_group_size": 5,
            "env_weight": 0.25,
        }
        other = await server.status_env(1)
        assert (other["queue_size"], other["self_queue_size"], other["env_weight"]) == ((5 + 10) // 5, 1, 0.75)
        by_query = (await server.client.get("/status-env", params={"env_id": 1})).json()
        assert by_query == other  # for proxies that strip the bodies of GET
        assert (await server.client.get("/status-env", params={"env_id": 9})).status_code == 422

    run(tmp_path, body)


def test_shares_go_by_weight_and_context_and_a_minimum_lowers_what_is_left(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({"min_batch_allocation": 0.25}, {"max_token_length": 6144}, batch_size=64)
        assert (await server.status_env(0))["env_weight"] == 0.25
        assert (await server.status_env(1))["unallocated_fraction"] == 0.75
        for first in range(8):
            await server.post("/scored_data", group(first))
        assert (await server.status_env(1))["queue_size"] == (32 - 16) // 4  # the other's minimum is not shared

    run(tmp_path, body)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_weight_of_nothing_is_no_error(tmp_path: Path, weight: float) -> None:
    async def body(server: Server) -> None:
        await server.start({"weight": weight})
        assert (await server.status_env(0))["env_weight"] == 1.0  # it is alone
        await server.post("/register-env", ENVIRONMENT)
        assert (await server.status_env(0))["env_weight"] == 0.01
        assert (await server.status_env(1))["env_weight"] == 1.0

    run(tmp_path, body)


def test_a_batch_holds_the_minimum_of_each_environment(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        shares = [{"min_batch_allocation": 0.5}, {"min_batch_allocation": 0.5}]
        await server.start(*shares, batch_size=8)
        for first in range(3):
            await server.post("/scored_data", group(first, env_id=0))
        await server.post("/scored_data", group(3, env_id=None))
        assert await server.batch() is None  # environment 1 has a right to half of it, and is alive
        await server.post("/scored_data", group(4, env_id=1))
        assert await server.batch() == [0, 4]
        assert await server.post("/disconnect-env", {"env_id": 1}) == {"status": "success"}
        assert await server.batch() == [1, 2]
        assert (await server.post("/disconnect-env", {"env_id": 5}))["status"] == "failure"

    run(tmp_path, body)


def test_an_environment_that_is_silent_is_waited_for_no_longer(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({}, {"desired_name": "gone", "min_batch_allocation": 0.5})
        assert (await server.status_env(0))["env_weight"] == 0.5
        server.store.roster.member(1).heard_at -= 60
        await server.post("/scored_data", group(1))
        status = await server.status_env(0)
        assert (status["env_weight"], status["unallocated_fraction"]) == (1.0, 1.0)
        assert await server.batch() == [1]
        assert (await server.status_env(1))["env_weight"] == 0.5  # it is back

    run(tmp_path, body, ghost_s=30.0)


def test_a_group_that_is_posted_again_is_counted_once(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        for _ in range(3):
            assert await server.post("/scored_data", group(1)) == {"status": "received"}
        assert (await server.post("/scored_data_list", [group(2), group(2)]))["groups_processed"] == 2
        await server.post("/scored_data", group(1, env_id=1))  # another environment's may well be the same
        assert (await server.get("/statistics"))["duplicates"] == 3
        assert [await server.batch() for _ in range(4)] == [[1], [2], [1], None]

    run(tmp_path, body)


def test_a_trainer_that_registers_again_gets_what_it_was_lent_and_lost(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        for first in range(3):
            await server.post("/scored_data", group(first))
        assert [await server.batch(), await server.batch()] == [[0], [1]]  # having asked again, it has the first
        await server.post("/register", REGISTRATION)
        assert (await server.get("/status"))["current_step"] == 1
        assert [await server.batch(), await server.batch(), await server.batch()] == [[1], [2], None]
        await server.post("/register", {**REGISTRATION, "starting_step": 20})  # another run
        assert (await server.get("/status"))["current_step"] == 20

    run(tmp_path, body)


def test_a_trainer_that_says_what_it_has_gets_a_lost_answer_again(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        for first in range(2):
            await server.post("/scored_data", group(first))
        answer = await server.client.get("/batch")
        number = int(answer.headers["asyncrl-batch"])
        assert await server.batch(params={"received": number - 1}) == [0]
        assert await server.batch(params={"received": number}) == [1]

    run(tmp_path, body)


def test_a_server_that_is_killed_goes_on_with_what_it_acknowledged(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({}, batch_size=8)
        for first in range(5):
            await server.post("/scored_data", group(first))
        assert await server.batch() == [0, 1]

    async def after(server: Server) -> None:
        assert await server.get("/status") == {"current_step": 1, "queue_size": 3}
        assert (await server.status_env(0))["self_queue_size"] == 3
        await server.post("/scored_data", group(3))  # of which the environment never heard that it came
        assert (await server.get("/statistics"))["duplicates"] == 1
        await server.post("/register", {**REGISTRATION, "batch_size": 8})
        assert [await server.batch(), await server.batch(), await server.batch()] == [[0, 1], [2, 3], None]

    run(tmp_path, body)
    run(tmp_path, after)


def test_a_reset_forgets_everything(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        await server.post("/scored_data", group(1))
        answer = await server.client.get("/reset_data")
        assert (answer.status_code, answer.text) == (200, "Reset successful")
        assert await server.get("/status") == {"current_step": 0, "queue_size": 0}
        assert await server.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
        await server.start({})
        assert await server.batch() is None

    async def after(server: Server) -> None:
        assert server.store.groups == []

    run(tmp_path, body)
    run(tmp_path, after)


def test_empty_fields_are_as_absent_ones(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        empty = {name: [] for name in ("advantages", "ref_logprobs", "messages", "overrides", "images")}
        await server.post("/scored_data", group(1, group_overrides={}, **empty))
        (found,) = (await server.get("/batch"))["batch"]
        assert all(found[name] is None for name in [*empty, "group_overrides"])

    run(tmp_path, body)


def test_numbers_in_other_clothes_are_numbers(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        await server.post("/scored_data", group(1, scores=["1.5", True, 1, 0]))
        (found,) = (await server.get("/batch"))["batch"]
        assert found["scores"] == [1.5, 1.0, 1.0, 0.0]
        await server.post("/scored_data", group(2, tokens=[[2.0, 12, 13]] * 4))
        assert await server.batch() == [2]

    run(tmp_path, body)


def test_the_disk_is_freed_of_what_the_trainer_has_and_nothing_else(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        await server.start({})
        await server.post("/scored_data", group(99, 1))
        for first in range(12):
            await server.post("/scored_data", group(first, 3))
            await server.batch()

    async def after(server: Server) -> None:
        assert (await server.status_env(0))["queue_size"] == 0
        assert len(server.store.groups) == 2  # one is lent, and one waits
        assert not (tmp_path / names[0]).exists()

    run(tmp_path, lambda server: server.start({}), file_bytes=2000)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "lock")
    run(tmp_path, body, file_bytes=2000)
    run(tmp_path, after, file_bytes=2000)


def test_a_connection_is_kept_between_requests_with_and_without_bodies(tmp_path: Path) -> None:
    async def body(server: Server) -> None:
        for path in ("/info", "/status", "/info"):
            answer = await server.client.get(path)
            assert "connection" not in answer.headers, answer.headers
        answer = await server.client.post("/register", json=REGISTRATION)
        assert "connection" not in answer.headers

    run(tmp_path, body)
