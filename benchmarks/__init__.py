"""Benchmarks: `python -m benchmarks time` on this machine, `python -m benchmarks tpu` for TPUs that are not here."""
