"""What models may be told about sharding, and how sharded weights are reached: ``infinity.zero``."""

from infinity.engine.offloading import OffloadStateTypeEnum
from infinity.plan.leaves import get_leaf_modules, set_leaf_modules, unset_leaf_modules
from infinity.weights.ds_names import ZeroParamStatus
from infinity.weights.init_context import Init
from infinity.zero.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from infinity.zero.external import register_external_parameter, unregister_external_parameter
from infinity.zero.gathered import GatheredParameters
from infinity.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_leaf_modules",
    "register_external_parameter",
    "set_leaf_modules",
    "unregister_external_parameter",
    "unset_leaf_modules",
]
