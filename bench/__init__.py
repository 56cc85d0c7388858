"""Benchmarks; each runs as `python -m bench.NAME`, prints a table, and ends with one line of JSON."""
