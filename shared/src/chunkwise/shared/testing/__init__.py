"""The parts of tests and benchmarks: float64 oracles, seeded inputs, comparisons, the TPU compiler (`testing.tpu`)."""
