"""The engine: what users touch (``facade``), the phases of a step (``loop``), and what they run on (``runtime``)."""

from infinity.engine.facade import Engine

__all__ = ["Engine"]
