"""Triton kernels of the `cuda` backend, one subject a file. Each has a twin in plain PyTorch that it is tested against.

They run on Hopper GPUs, and in Triton's interpreter (TRITON_INTERPRET=1) on any machine, bit for bit the same casts.
"""
