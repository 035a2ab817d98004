"""Facts of the machine, read once for everybody."""
