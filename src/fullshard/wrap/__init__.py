"""Wrap policies, the plans that they make, and annotations in the code of a model."""

from fullshard.wrap.annotate import enable_wrap, wrap
from fullshard.wrap.block_plan import plan_blocks
from fullshard.wrap.plan import WrapFunction, WrapPlan
from fullshard.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    Policy,
    PolicyFunction,
    _or_policy,
    _Policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    plan_for,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.wrap.tree import PlannedParameter
from fullshard.wrap.units import PlannedUnit

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "PlannedParameter",
    "PlannedUnit",
    "Policy",
    "PolicyFunction",
    "WrapFunction",
    "WrapPlan",
    "_Policy",
    "_or_policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "plan_blocks",
    "plan_for",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
