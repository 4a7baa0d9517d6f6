"""Fused operations of the trainer: a Triton kernel each, with an eager twin that runs anywhere."""

from d9d_kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from d9d_kernels.glu import swiglu as swiglu
from d9d_kernels.grouped import grouped_mm as grouped_mm
from d9d_kernels.moe import moe_permute as moe_permute
from d9d_kernels.moe import moe_route as moe_route
from d9d_kernels.moe import moe_unpermute as moe_unpermute
from d9d_kernels.norm import rms_norm as rms_norm
from d9d_kernels.qk import qk_norm_rope as qk_norm_rope
from d9d_kernels.rotary import rope as rope
from d9d_kernels.squares import sum_of_squares as sum_of_squares
from d9d_kernels.stochastic import stochastic_adamw_ as stochastic_adamw_
from d9d_kernels.stochastic import stochastic_copy_ as stochastic_copy_

__all__ = [
    "grouped_mm",
    "linear_cross_entropy",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "stochastic_adamw_",
    "stochastic_copy_",
    "sum_of_squares",
    "swiglu",
]
