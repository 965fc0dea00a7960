"""Real runs of online RL: what GRPO and PPO gain, what reward hacking looks like, what faults of a reward cost."""
