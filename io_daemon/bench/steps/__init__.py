"""A training step replayed: what it asks of the daemon, the work beside it, and what follows for the full model."""
