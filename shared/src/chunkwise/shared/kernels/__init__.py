"""The parts of kernels: launches, layout, tiles, products, decays and the inverse."""
