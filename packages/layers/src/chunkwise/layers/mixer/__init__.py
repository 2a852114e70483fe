"""What layers share around their operators: tokens and products, convolutions, and the norm at the end."""
