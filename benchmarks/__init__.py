"""Benchmarks: `python -m benchmarks -h` lists the commands; every result is checked before it counts."""
