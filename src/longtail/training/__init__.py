"""Stage one: training loop, schedule, checkpoints."""
