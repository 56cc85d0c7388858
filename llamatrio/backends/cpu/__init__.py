"""The CPU backend: one compiled step, a thread team, repacked weights."""
