"""What ranks and daemon share."""
