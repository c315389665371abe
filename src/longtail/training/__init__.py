"""Stage one: the loop, its plan, its checkpoints."""
