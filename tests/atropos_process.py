"""An environment of Atropos as people write them, run in an environment of its own: it knows nothing of asyncrl.

`python atropos_process.py serve ...`; with KIND=chat it asks for chats and tokenises them itself, as most do, and
otherwise it takes the tokens that it is given.
"""

from __future__ import annotations

import os
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Letters(BaseEnv):
    """Pays for the share of one letter in a reply."""

    name = "letters"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(group_size=4), [APIServerConfig()]

    async def setup(self) -> None:
        self.asked = 0

    async def get_next_item(self) -> Any:
        self.asked += 1
        return {"letter": "abcdefgh"[self.asked % 8]}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        messages = [{"role": "user", "content": f"Write the letter {item['letter']}."}]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        if os.environ.get("KIND") == "chat":
            answer = await self.server.chat_completion(messages=messages, n=self.config.group_size, max_tokens=12)
            for choice in answer.choices:
                said = [*messages, {"role": "assistant", "content": choice.message.content}]
                # as atroposlib's tokenize_for_trainer does, which transformers 5 breaks
                tokens = self.tokenizer.apply_chat_template(said, return_dict=False)
                asked = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                group["tokens"].append(tokens)
                group["masks"].append([-100] * len(asked) + tokens[len(asked) :])
                group["scores"].append(choice.message.content.count(item["letter"]) / 12)
        else:
            group["inference_logprobs"] = []
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                await managed.chat_completion(messages=messages, n=self.config.group_size, max_tokens=12)
                nodes = managed.get_state()["nodes"]
            for node in nodes:
                group["tokens"].append(node.tokens)
                group["masks"].append(node.masked_tokens)
                group["inference_logprobs"].append(node.logprobs)
                group["scores"].append(node.full_text.count(item["letter"]) / 12)
        return group, []


if __name__ == "__main__":
    Letters.cli()
