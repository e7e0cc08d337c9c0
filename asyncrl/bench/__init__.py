"""Benchmarks that `asyncrl bench` runs: they measure speed, print ratios, and assert nothing."""
