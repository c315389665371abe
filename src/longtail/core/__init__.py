"""Used by all other packages: files, arrays, progress, text."""
