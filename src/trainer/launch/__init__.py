"""From the command line to the processes of a job: config composition, ranks, signals, liveness, exit codes."""
