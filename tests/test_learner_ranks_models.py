"""What belongs to a learner besides its policy is shared by ranks too: teachers, servers that are asked, critics.

One process is the reference, in the same steps; checkpoints of either are gone on with by the other.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from critics import CRITICS
from rank_of_learner import learn
from rank_scenes import Scene, assert_alike
from test_learner_served import FakeServer
from tiny_model import build_tiny_model

pytestmark = pytest.mark.slow


NAMES = [*CRITICS, "distilled", "by_itself", "averaged", "served"]
KEPT = ("model", "head", "averaged")
"""Those that have more than the policy to keep."""


def with_critic(critic: dict[str, Any]) -> dict[str, Any]:
    further = {"updates_per_batch": 2, "value_clip": 0.2} if critic["kind"] == "model" else {}
    return {"loss": "ppo", "groups": "mixed", "critic": {**critic, **further, "gamma": 0.9, "lam": 0.8}}


def distilled(teacher: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"loss": "distillation", "groups": "told", "teacher": teacher, **settings}


class Served:
    """A teacher behind HTTP, and the prompts that it was asked for. Below /broken it fails the second batch."""

    def __init__(self) -> None:
        self.fake = fake = FakeServer()
        batches: list[bytes] = []

        def answer(request: httpx.Request) -> httpx.Response:
            if "/broken/" not in request.url.path:
                return fake(request)
            if request.url.path.endswith("completions") and len(json.loads(request.content)["prompt"]) > 1:
                batches.append(request.content)
                if len(batches) == 2:
                    return httpx.Response(500, text="out of memory")
            return answer(
                httpx.Request(request.method, str(request.url).replace("/broken", ""), content=request.content)
            )

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                reply = answer(httpx.Request(self.command, f"http://here{self.path}", content=body))
                self.send_response(reply.status_code)
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *said: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def run(self) -> None:
        self._server.serve_forever()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def forget(self) -> list[tuple[int, ...]]:
        """Return the prompts of batches that were asked since the last call, sorted; one alone sees that it answers."""
        asked = sorted(tuple(prompt) for prompts in self.fake.prompts if len(prompts) > 1 for prompt in prompts)
        self.fake.prompts.clear()
        return asked


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def kinds(scene: Scene, served: Served) -> dict[str, dict[str, Any]]:
    """The settings of each run, by name."""
    teacher = build_tiny_model(scene.directory / "untied-teacher", seed=2, num_layers=1)
    server = {"source": "engine", "url": served.url}
    return {
        **{name: with_critic(critic) for name, critic in CRITICS.items()},
        "distilled": distilled({"source": "model", "path": str(teacher), "divergence": "jsd"}),
        "by_itself": distilled({"source": "self", "divergence": "forward_kl", "top_k": 9}),
        "averaged": distilled({"source": "self", "ema_rate": 0.3}, microbatch_tokens=90),
        "served": distilled({**server, "top_k": 5}, reference=server, loss_settings={"kl_coef": 0.1}),
    }


@pytest.fixture(scope="module")
def found(scene: Scene, kinds: dict[str, dict[str, Any]], served: Served) -> dict[str, Any]:
    """Of each kind: steps 0 and 1 of one process and of two ranks; of some step 2 too, by the other's checkpoint."""
    results: dict[str, Any] = {}
    for name, settings in kinds.items():
        served.forget()
        results[f"{name}-one"] = learn(scene.run(f"{name}-one", ranks=1, seeds=(0, 1), **settings))
        results[f"{name}-one"]["asked"] = served.forget()
    runs = [scene.run(f"{name}-two", ranks=2, seeds=(0, 1), **settings) for name, settings in kinds.items()]
    runs += [
        scene.run(f"{name}-two-after-one", ranks=2, seeds=(2,), after=f"{name}-one", **kinds[name]) for name in KEPT
    ]
    server = {"source": "engine", "url": f"{served.url}/broken"}
    runs.append({**scene.run("broken", ranks=2, seeds=(7,), loss="opd", teacher=server), "first": 0})
    results |= dict(zip([run["job"]["run_id"] for run in runs], scene.on_ranks(2, *runs), strict=True))
    results["asked"] = served.forget()
    for name in KEPT:
        for after in ("one", "two"):
            run = scene.run(f"{name}-one-after-{after}", ranks=1, seeds=(2,), after=f"{name}-{after}", **kinds[name])
            results[run["job"]["run_id"]] = learn(run)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_take_the_steps_of_one_process(found: dict[str, Any], name: str) -> None:
    for ours, theirs in zip(found[f"{name}-two"]["steps"], found[f"{name}-one"]["steps"], strict=True):
        assert_alike(ours, theirs)
    key = "value_loss" if name in CRITICS else "teacher_divergence"
    first, second = (step[key] for step in found[f"{name}-one"]["steps"])
    assert first != second


@pytest.mark.parametrize("name", KEPT)
def test_one_process_goes_on_with_what_two_ranks_saved_and_the_other_way_round(
    found: dict[str, Any], name: str
) -> None:
    for other in ("one-after-two", "two-after-one"):
        both = zip(found[f"{name}-{other}"]["steps"], found[f"{name}-one-after-one"]["steps"], strict=True)
        for ours, theirs in both:
            assert_alike(ours, theirs)


def test_ranks_ask_a_server_for_each_row_once(found: dict[str, Any]) -> None:
    assert len(found["served-one"]["asked"]) > 40
    of_these = set(found["served-one"]["asked"])
    assert [prompt for prompt in found["asked"] if prompt in of_these] == found["served-one"]["asked"]


def test_a_server_that_fails_one_rank_fails_all_by_name(found: dict[str, Any]) -> None:
    assert re.match(r"learner rank [01]: the server at .* answers 500: out of memory", found["broken"]["refused"])


def test_each_rank_keeps_a_part_of_average_and_value_model(scene: Scene, found: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    for name, part in (("averaged", "teacher"), ("model", "critic")):
        folder = scene.directory / f"{name}-two" / "learner"
        shards = [load_file(path) for path in sorted((folder / part).iterdir())]
        assert len(shards) == 2
        whole = load_file(scene.directory / f"{name}-one" / "learner" / f"{part}.safetensors")
        for key, tensor in whole.items():
            assert sum(shard[key].numel() for shard in shards if key in shard) == tensor.numel(), key
        sizes = [sum(tensor.numel() for tensor in shard.values()) for shard in shards]
        assert max(sizes) < 0.6 * sum(sizes)
