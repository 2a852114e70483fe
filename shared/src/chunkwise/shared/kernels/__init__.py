"""What kernels are made of: launches, layout, tiles, products, decays and the inverse."""
