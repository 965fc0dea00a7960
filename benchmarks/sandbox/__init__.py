"""What attacks the sandbox for programs that a model wrote, what must run in it, and what it refuses to run without."""
