"""What every room uses: files, arrays, progress, text."""
