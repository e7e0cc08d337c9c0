"""A multi-turn environment as people write them for verifiers 0.4: the world answers what the model says."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number)) / trace.num_turns


class Numbers(vf.Taskset[GuessTask]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number = (number * 7 + 5) % 32
            yield GuessTask(GuessData(number=number), self.config.task)


class GuessingConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    turns: int = 4


class Guessing(vf.Env[GuessingConfig]):
    async def run(self, task, agents) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn("Guess my number.")
            for _ in range(self.config.turns - 1):
                if segment.terminated or segment.last_reply == str(task.data.number):
                    return
                guess = int(segment.last_reply) if segment.last_reply.isdecimal() else 0
                segment = await talk.turn("larger" if guess < task.data.number else "smaller")


__all__ = ["Guessing", "Numbers"]
