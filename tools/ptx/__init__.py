"""Run compiled kernels without a GPU: an emulator of the PTX that Triton makes.

Triton's interpreter runs the same source, but nothing of what the compiler adds: which thread holds what, shared memory
and its swizzles, barriers, asynchronous copies, tensor core fragments. This runs the compiled code: a block of threads
at a time, all of its threads in step, in numpy. Every address is checked, and so is the order of accesses to shared
memory: on a GPU nothing but a barrier lets one warp see what another wrote (`memory.SharedMemory`).

Not emulated: time, caches, and the assembler's part, from PTX to machine code.
"""
