"""What each command computes, without printing."""
