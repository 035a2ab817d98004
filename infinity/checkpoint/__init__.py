"""Checkpoints as files: what lies in a directory, how it gets there whole, and how it is read. No engine is needed."""
