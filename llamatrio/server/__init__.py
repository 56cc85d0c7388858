"""HTTP: a Quart-Trio app under Hypercorn."""
