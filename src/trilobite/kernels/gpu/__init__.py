"""The GPU engine: Triton kernels on a layout of their own."""
