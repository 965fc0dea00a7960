"""Time and memory of training steps beside those of TRL, and beside what the machine can do at most."""
