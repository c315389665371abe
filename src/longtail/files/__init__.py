"""Used by all other packages: whole files or none, locks, reading of untrusted files, arrays, progress, text."""
