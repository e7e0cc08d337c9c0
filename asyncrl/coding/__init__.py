"""Coding tasks: what one is, where they come from, how they are graded, and what can be wrong with them."""
