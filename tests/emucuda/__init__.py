"""An emulated CUDA driver for tests: see README.md."""
