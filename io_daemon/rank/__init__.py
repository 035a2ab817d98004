"""The rank's door to the daemon."""
