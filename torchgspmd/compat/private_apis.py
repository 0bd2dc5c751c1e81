"""Every private API of torch that the package uses: one row each, with the versions it was checked
on and what is lost without it.

    from ..compat.private_apis import FunctionalTensor      what the row names; a class, function or module of torch

At import nothing raises: in the place of an API that this torch lacks stands a class that raises a
ShardingError when it is called or looked into. `require("plan")` says so before anything starts.
Rows are never used by their path alone: a test compares the table with the names in the sources,
both ways.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import ShardingError, user_line

if TYPE_CHECKING:  # the same names, for type checkers
    from torch._ops import OpOverload, OpOverloadPacket  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: F401
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # noqa: F401
    from torch.utils import _pytree  # noqa: F401
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401

CHECKED = ("2.9", "2.13", "2.15")  # releases on which the tests pass
PLAN, PARALLELIZE, XLA, NOTHING = "plan", "parallelize", "backend 'xla'", ""


@dataclass(frozen=True)
class PrivateApi:
    """path: dotted, from `torch`. needed_for: what does not work at all without it. lost: what else
    is lost. versions: of CHECKED, those which have it.
    """

    path: str
    needed_for: str
    lost: str = ""
    versions: tuple[str, ...] = CHECKED

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_of_xla(self) -> bool:
        return self.path.startswith("torch_xla.")


def _rows(
    needed_for: str, owner: str, names: str, lost: str = "", versions: tuple[str, ...] = CHECKED
) -> tuple[PrivateApi, ...]:
    return tuple(
        PrivateApi(f"{owner}.{name}", needed_for, lost, versions) for name in names.split()
    )


TABLE: tuple[PrivateApi, ...] = (
    # operators and their decompositions
    *_rows(PLAN, "torch._ops", "OpOverload OpOverloadPacket"),
    *_rows(PLAN, "torch._ops.OpOverload", "_schema"),
    *_rows(PLAN, "torch._C", "DispatchKey _DisableAutocast _dispatch_has_kernel_for_dispatch_key"),
    *_rows(PLAN, "torch._decomp", "core_aten_decompositions decomposition_table"),
    *_rows(PLAN, "torch._library.custom_ops.CustomOpDef", "_opoverload"),
    *_rows(
        NOTHING,
        "torch._C",
        "_select_conv_backend",
        "small convolutions may round otherwise than whole ones",
    ),
    # capture
    *_rows(PLAN, "torch.utils", "_pytree"),
    *_rows(PLAN, "torch.utils._python_dispatch", "TorchDispatchMode _disable_current_modes"),
    *_rows(PLAN, "torch._C", "DisableTorchFunction"),
    *_rows(PLAN, "torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode"),
    *_rows(PLAN, "torch._subclasses.functional_tensor", "FunctionalTensor FunctionalTensorMode"),
    *_rows(PLAN, "torch", "_from_functional_tensor _sync _to_functional_tensor"),
    *_rows(PLAN, "torch.fx.experimental.proxy_tensor", "get_proxy_mode get_proxy_slot make_fx"),
    *_rows(PLAN, "torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
    *_rows(PLAN, "torch._C._functorch", "is_functorch_wrapped_tensor peek_interpreter_stack"),
    *_rows(PLAN, "torch.autograd.graph", "_engine_run_backward"),
    *_rows(
        PLAN,
        "torch.nn.Module",
        "_backward_hooks _backward_pre_hooks _buffers _forward_hooks _forward_pre_hooks _modules _parameters",
    ),
    *_rows(PLAN, "torch.Tensor", "_use_count _version"),
    *_rows(PLAN, "torch.UntypedStorage", "_cdata"),
    *_rows(
        NOTHING,
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException DynamicOutputShapeException UnsupportedOperatorException",
        "what cannot be captured raises torch's error in place of a ShardingError",
    ),
    *_rows(
        NOTHING,
        "torch.fx.experimental.symbolic_shapes",
        "GuardOnDataDependentSymNode",
        "a branch on values raises torch's error in place of a ShardingError",
    ),
    *_rows(
        NOTHING,
        "torch._C._autograd",
        "_pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks "
        "_top_saved_tensors_default_hooks",
        "a checkpoint around a call of the model",
    ),
    *_rows(
        NOTHING,
        "torch",
        "_disable_dynamo",
        "torch.compile of a program that has a wrapped module in it",
    ),
    # what library code is told during a capture
    *_rows(
        NOTHING,
        "torch.compiler",
        "_is_compiling_flag _is_exporting_flag",
        "models that ask whether they are being compiled",
    ),
    *_rows(NOTHING, "torch._higher_order_ops.flex_attention", "math_attention", "flex_attention"),
    *_rows(
        NOTHING,
        "torch.nn.attention.flex_attention",
        "_validate_device flex_attention_hop",
        "flex_attention on CPUs",
    ),
    *_rows(
        NOTHING,
        "torch.nn.modules.transformer",
        "_detect_is_causal_mask",
        "nn.Transformer with masks",
    ),
    *_rows(
        NOTHING,
        "torch.distributions.Distribution",
        "_validate_args",
        "distributions that look at values",
    ),
    *_rows(PLAN, "torch.nn.modules.batchnorm", "_BatchNorm"),
    *_rows(
        NOTHING,
        "torch.nn.modules.batchnorm._BatchNorm",
        "_check_input_dim",
        "BatchNorm with momentum=None",
    ),
    *_rows(
        NOTHING,
        "torch.nn.RNNBase",
        "_flat_weights _flat_weights_names _update_flat_weights",
        "LSTM, GRU and RNN",
    ),
    *_rows(NOTHING, "torch.Tensor", "_indices _values", "sparse matrices"),
    # programs that run
    *_rows(PLAN, "torch.ops", "_c10d_functional"),
    *_rows(PLAN, "torch", "_foreach_copy_"),
    *_rows(NOTHING, "torch", "_log_softmax _softmax", "a microsecond for each call of softmax"),
    # parameters as DTensors
    *_rows(PARALLELIZE, "torch.distributed.tensor.DTensor", "_local_tensor _op_dispatcher _spec"),
    *_rows(
        PARALLELIZE,
        "torch.distributed.tensor.DTensor._op_dispatcher",
        "_allow_implicit_replication _custom_op_handlers",
    ),
    *_rows(
        NOTHING,
        "torch.distributed.tensor.DTensor._op_dispatcher",
        "_propagate_op_sharding_dispatch_slow_path",
        "operations on parameters for which DTensor has no layout",
        ("2.13", "2.15"),
    ),
    *_rows(PARALLELIZE, "torch.Tensor", "_backward_hooks _post_accumulate_grad_hooks"),
    *_rows(PARALLELIZE, "torch._C", "_storage_Use_Count _will_engine_execute_node"),
    # torch_xla
    *_rows(
        XLA,
        "torch_xla._XLAC",
        "_get_xla_sharding_spec _get_xla_tensors_hlo _global_tensor_from_cpu_shards "
        "_xla_annotate_custom_sharding _xla_get_runtime_devices _xla_get_spmd_config_is_locked",
        versions=("2.9",),
    ),
)
_BY_NAME = {api.name: api for api in TABLE}


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version."""
    major, minor, *_ = version.partition("+")[0].split(".")
    return int(major), int(minor)


def lookup(api: PrivateApi) -> Any:
    """What a row names; AttributeError or ImportError if this torch lacks it."""
    first, *rest = api.path.split(".")
    found, path = importlib.import_module(first), first
    for name in rest[:-1]:
        path = f"{path}.{name}"
        found = _inside(found, name, path)
    if hasattr(found, rest[-1]) or not isinstance(found, type):
        return _inside(found, rest[-1], api.path)
    return _of_instances(found, rest[-1])


def _inside(owner: Any, name: str, path: str) -> Any:
    """A module before an attribute: torch._higher_order_ops has a function in front of its module
    flex_attention.
    """
    if hasattr(owner, "__path__"):  # a package
        try:
            return importlib.import_module(path)
        except ImportError:
            pass
    return getattr(owner, name)


def _of_instances(owner: type, name: str) -> None:
    """None if instances of a class have such an attribute, since it is annotated or its methods
    mention it; else an AttributeError.
    """
    methods = [getattr(method, "__code__", None) for method in vars(owner).values()]
    named = {
        n
        for code in methods
        if code is not None
        for n in (*code.co_names, *code.co_consts)
        if isinstance(n, str)
    }
    if name not in getattr(owner, "__annotations__", {}) and name not in named:
        raise AttributeError(name)


def is_there(api: PrivateApi) -> bool:
    try:
        lookup(api)
    except (AttributeError, ImportError):
        return False
    return True


class _Missing(type):
    """A class in the place of an API that is missing."""

    api: PrivateApi

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise error_without(cls.api)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise error_without(cls.api)


def is_missing(found: Any) -> bool:
    """Whether what was imported from here stands in the place of a missing API."""
    return isinstance(found, _Missing)


def error_without(*apis: PrivateApi) -> ShardingError:
    """What a use of missing APIs raises."""
    names, lost = (
        ", ".join(a.path for a in apis),
        next((a.needed_for or a.lost for a in apis if a.needed_for or a.lost), ""),
    )
    return ShardingError(
        f"torch {torch.__version__} lacks {names}",
        where=user_line(),
        why=f"needed for {lost}" if lost else None,
        fix=f"a torch that torchgspmd was checked on: {', '.join(CHECKED)}; "
        "`python -m torchgspmd doctor` says what is missing",
    )


def __getattr__(name: str) -> Any:
    """The API of that name, or what stands in its place."""
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = _BY_NAME[name]
    try:
        found = lookup(api)
    except (AttributeError, ImportError):
        found = _Missing(name, (), {"api": api})
    globals()[name] = found
    return found


def has(path: str) -> bool:
    """Whether this torch has the API of a row, for what works without it. path: that of the row."""
    return is_there(next(api for api in TABLE if api.path == path))


@cache
def missing(needed_for: str) -> tuple[PrivateApi, ...]:
    """The rows without which something does not work, and which this torch lacks."""
    return tuple(api for api in TABLE if api.needed_for == needed_for and not is_there(api))


def require(*needed_for: str) -> None:
    """ShardingError if an API is missing without which something does not work: one of PLAN,
    PARALLELIZE.
    """
    apis = tuple(api for use in needed_for for api in missing(use))
    if apis:
        raise error_without(*apis)
