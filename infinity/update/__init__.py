"""Gradients, and the step of the optimizer."""
