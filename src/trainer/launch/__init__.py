"""From the command line to the processes of a job: composing the config, ranks, signals, liveness, exit codes."""
