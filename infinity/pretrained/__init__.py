"""Weights from files into a model, wherever its parameters are."""

from infinity.pretrained.load import Loaded, load_pretrained

__all__ = ["Loaded", "load_pretrained"]
