"""What tests and benchmarks use: float64 oracles, seeded inputs, comparisons, and the TPU compiler (`testing.tpu`)."""
