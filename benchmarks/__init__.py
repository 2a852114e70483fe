"""Benchmarks: `python -m benchmarks -h` lists the commands; the error of a result is checked before its time counts."""
