#!/usr/bin/env bash
# Train on this machine, one process a GPU:
#     scripts/launch/one_node.sh +recipe=fp8_delayed run.name=mine
# PROCESSES  how many (default: the GPUs there are)
# RESTARTS   how often a run that fails resumes by itself from its last checkpoint (default: 0; more needs run.name)
set -euo pipefail
NODES=1 exec "$(dirname "$(readlink -f "$0")")/two_nodes.sh" "$@"
