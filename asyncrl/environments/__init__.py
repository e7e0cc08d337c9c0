"""Environments: what asks tasks and scores what came back. An import of this package starts nothing and loads none."""

from asyncrl.environments.loading import EnvironmentSettings, load_environment, resolve_options, spell_out

__all__ = ["ENVIRONMENTS", "EnvironmentSettings", "load_environment", "resolve_options", "spell_out"]

ENVIRONMENTS = {
    "agent": "asyncrl.environments.agent:AgentEnvironment",
    "atropos": "asyncrl.environments.atropos:AtroposEnvironment",
    "bugfix": "asyncrl.environments.bugfix:BugFixEnvironment",
    "coding_agent": "asyncrl.environments.coding_agent:CodingAgentEnvironment",
    "humanevalfix": "asyncrl.environments.humanevalfix:HumanEvalFixEnvironment",
    "mixed": "asyncrl.environments.mixed:MixedEnvironment",
    "openrlhf": "asyncrl.environments.openrlhf:OpenRLHFEnvironment",
    "served": "asyncrl.environments.served:ServedEnvironment",
    "single_turn": "asyncrl.environments.single_turn:SingleTurnEnvironment",
    "slime": "asyncrl.environments.slime:SlimeEnvironment",
    "verifiers": "asyncrl.environments.verifiers:VerifiersEnvironment",
}
"""Name -> "module:Class". Any other class is named by "module:Class" itself."""
