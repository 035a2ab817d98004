"""How a model is cut: pure."""
