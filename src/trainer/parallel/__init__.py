"""How ranks share a model: the mesh, FSDP2 and HSDP, expert parallelism; how blocks are recomputed and compiled."""
