"""What every figure shares: canvas, colours, axes and labels."""
