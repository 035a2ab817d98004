"""What models may be told about sharding: ``infinity.zero``."""

from infinity.plan.leaves import get_leaf_modules, set_leaf_modules, unset_leaf_modules

__all__ = ["get_leaf_modules", "set_leaf_modules", "unset_leaf_modules"]
