"""torch.distributed.fsdp's fully_shard (FSDP2) refuses parameters that are on a mesh already."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from ..errors import ShardingError, user_line
from .ours import is_ours


def with_refusal(before: Callable) -> Callable:
    """Wrap FSDP2's check on a parameter that it is about to shard; it has sent nothing then."""

    @functools.wraps(before)
    def verify(name: str, parameter: nn.Parameter) -> None:
        if is_ours(parameter):
            raise ShardingError(
                "fully_shard (FSDP2) is around a module on a mesh",
                where=user_line(),
                why=f"the mesh stores '{name}', gathers it where it is used and reduces its "
                "gradient",
                fix="leave it out: parallelize(..., shard_updates='data') stores parameters in "
                "parts, param_dtype and reduce_dtype take the place of MixedPrecisionPolicy; "
                "what is around the module may have it: "
                "fully_shard(..., ignored_params={*module.parameters()})",
            )
        before(name, parameter)

    return verify
