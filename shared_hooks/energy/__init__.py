"""Energy from what the machine has: one file a backend."""
