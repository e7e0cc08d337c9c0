"""What `asyncrl bench learner` runs, and the figures that the project promises of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.bench.goals import Goal
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBench:
    """Sizes of the benchmark; the defaults are what the project's figures are measured with."""

    model: Path
    threads: int = 2
    """Of each process; they take turns. 0 takes one a core."""
    rounds: int = 3
    """In which the variants take turns; figures are medians over rounds."""
    microbatch_tokens: int = 2048
    """Real tokens that one forward of the learner reads."""
    segments: int = 8
    """Ragged sequences in the batch."""
    shortest: int = 64
    longest: int = 1024
    """Tokens; the lengths lie evenly between the two."""
    prompt_tokens: int = 16
    """Of each ragged sequence; the rest is trained on. Few, since only trained tokens cost the learner a logit."""
    sequences: int = 4
    """That padding brings to one length: by default 2,176 real tokens on average, as the learner reads at once."""
    sharing_groups: int = 2
    sharing_size: int = 8
    sharing_prompt: int = 256
    """Tokens that the segments of a group begin with."""
    sharing_completion: int = 64
    """Tokens that follow in each."""
    step_tokens: int = 32768
    """Tokens of the one whole optimizer step."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the option's name."""
        for name, least in (
            ("threads", 0),
            ("rounds", 1),
            ("microbatch_tokens", 16),
            ("segments", 2),
            ("shortest", 2),
            ("prompt_tokens", 1),
            ("sequences", 2),
            ("sharing_groups", 1),
            ("sharing_size", 2),
            ("sharing_prompt", 1),
            ("sharing_completion", 1),
            ("step_tokens", 2),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(self, name)}")
        if self.longest < self.shortest:
            raise ConfigError(f"--longest must be >= --shortest ({self.shortest} tokens), got {self.longest}")


GOALS = (
    Goal(name="speed_over_padded", words="speed, over padded", limit=1.8, is_least=True),
    Goal(name="memory_of_padded", words="peak memory, of padded", limit=0.5, is_least=False),
    Goal(name="speed_over_alone", words="speed, over one at a time", limit=0.9, is_least=True),
    Goal(name="speed_of_sharing", words="speed, over nothing shared", limit=1.8, is_least=True),
    Goal(name="loss_share_of_step", words="loss and diagnostics, of a step", limit=0.03, is_least=False),
)
