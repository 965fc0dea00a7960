"""The table that compares methods for several rewards: `python -m benchmarks.multi_reward`."""

EXPERIMENT = "multi_reward"
