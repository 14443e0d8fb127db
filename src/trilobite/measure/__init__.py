"""What measures: GPU kernels, tiles, the shapes of real models. Out of the product path."""
