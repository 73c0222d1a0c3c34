"""Decoding: the loop of rounds, batches, and texts."""
