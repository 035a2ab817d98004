"""Who performs the block I/Os: the daemon's reactor, or another library to compare it with."""
