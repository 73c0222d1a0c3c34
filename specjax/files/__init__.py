"""Files: atomic directories, JSON lines."""
