"""asyncrl: asynchronous off-policy reinforcement learning for LLM agents."""

__version__ = "0.1.0"
