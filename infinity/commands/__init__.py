"""What infinity runs from a shell."""
