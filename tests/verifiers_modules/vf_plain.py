"""A task set of verifiers 0.4 that brings a harness of its own: a program that asks twice, and dies of any refusal."""

import json
import sys

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request
url, key, messages = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for _ in range(2):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url + "/chat/completions", body, headers)) as answer:
        messages += [json.load(answer)["choices"][0]["message"], {"role": "user", "content": "Go on."}]
"""


class PlainTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float("yes" in trace.last_reply)

    @vf.reward
    async def odd(self, trace: vf.Trace) -> float:
        letters = b"" if "yes" in trace.last_reply else trace.last_reply.encode()
        return sum(letter % 2 for letter in letters) / max(1, len(letters))


class Questions(vf.Taskset[PlainTask]):
    def load(self) -> list[PlainTask]:
        return [
            PlainTask(vf.TaskData(name="one", prompt="Say yes.")),
            PlainTask(vf.TaskData(name="one", prompt="Yes?")),
        ]


class Plain(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        messages = json.dumps([{"role": "user", "content": data.prompt}])
        return await runtime.run_program([sys.executable, "-S", "-c", PROGRAM, endpoint, secret, messages], {})


__all__ = ["Plain", "Questions"]
