"""A single-turn environment as people write them for verifiers 0.4: it knows nothing of asyncrl."""

import asyncio

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        if "broken" in trace.last_reply:
            raise LookupError("the judge is asleep")
        if "slow" in trace.last_reply:
            await asyncio.sleep(60)
        if "endless" in trace.last_reply:
            return float("nan")
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    last: int = 4


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(name=f"sum-{n}", prompt=f"What is {n} + {n}?", system_prompt="Add.", answer=2 * n))
            for n in range(1, self.config.last + 1)
        ]


__all__ = ["Sums"]
