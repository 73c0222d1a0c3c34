"""Files: whole directories or nothing, JSON lines, digests."""
