"""The GPU kernels: measured on a GPU; compiled and emulated without one."""
