"""How ranks share a model (mesh, FSDP2 and HSDP, expert parallelism), and how blocks are recomputed and compiled."""
