"""The bytes of packed weights in the order that the GPU kernels read."""
