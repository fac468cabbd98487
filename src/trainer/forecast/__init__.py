"""What a run will cost, before it starts: checks across keys, memory, time, parallel layouts."""
