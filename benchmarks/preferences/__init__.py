"""Preference losses beside TRL's: on the same log-probs, and through training."""
