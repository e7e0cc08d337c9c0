"""An environment with tools as people write them for verifiers 0.4: functions that a server of its own offers."""

import verifiers.v1 as vf


class Till(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def price(self, fruit: str, count: int = 1) -> str:
        """Return what so many pieces of a fruit cost."""
        return str({"apple": 3, "pear": 5}[fruit] * count)


class ShopConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[vf.TaskData, vf.State, ShopConfig]):
    @classmethod
    def toolsets(cls, config: ShopConfig) -> list[vf.Toolset]:
        return [Till(config.tools)]

    @vf.reward
    async def asked_and_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "10" and [m.content for m in trace.tool_messages] == ["10"])


class ShopTasksetConfig(vf.TasksetConfig):
    task: ShopConfig = ShopConfig()


class Shop(vf.Taskset[ShopTask, ShopTasksetConfig]):
    def load(self) -> list[ShopTask]:
        return [ShopTask(vf.TaskData(name="pears", prompt="What do two pears cost?"), self.config.task)]


__all__ = ["Shop"]

if __name__ == "__main__":
    Till.run()
