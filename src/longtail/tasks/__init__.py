"""What each command does, without its words."""
