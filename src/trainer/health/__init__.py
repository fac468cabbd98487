"""How a run is doing: what its tensors, its experts, its GPU and its curves say, and what is worth an alert."""
