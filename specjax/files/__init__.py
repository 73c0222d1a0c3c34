"""Files: atomic directories, JSON lines, digests."""
