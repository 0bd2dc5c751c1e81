"""Table: torch's private APIs that the package uses, with checked versions and purposes.

    from ..compat.private_apis import FunctionalTensor      # a row's class, function or module

An import never raises. A class replaces an API that this torch lacks. Calling that class, or
reading an attribute from it, raises a ShardingError. `require("plan")` raises before anything
starts. A test compares the table with the names in the sources, both ways.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import ShardingError

if TYPE_CHECKING:  # the same names, for type checkers
    from torch._ops import OpOverload, OpOverloadPacket  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: F401
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # noqa: F401
    from torch.utils import _pytree  # noqa: F401
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401

CHECKED = ("2.9", "2.13", "2.14", "2.15")  # releases on which the tests pass
PLAN, PARALLELIZE, XLA, NOTHING = "plan", "parallelize", "backend 'xla'", ""


@dataclass(frozen=True)
class PrivateApi:
    """A private torch API.

    path: dotted, from `torch`. needed_for: the part that does not work at all without the API.
    lost: further losses. versions: those in CHECKED that have it.
    """

    path: str
    needed_for: str
    lost: str = ""
    versions: tuple[str, ...] = CHECKED

    @property
    def name(self) -> str:
        """The path's last name."""
        return self.path.rpartition(".")[2]

    @property
    def is_of_xla(self) -> bool:
        """True for a torch_xla API."""
        return self.path.startswith("torch_xla.")


# Part that needs them, owner, names, the releases that have them if not all, loss without them. An
# indented line goes on with the row above it.
_ROWS = """\
# operators and their decompositions
plan torch._ops: OpOverload OpOverloadPacket
plan torch._ops.OpOverload: _schema
plan torch._C: DispatchKey _DisableAutocast _dispatch_has_kernel_for_dispatch_key
plan torch._decomp: core_aten_decompositions decomposition_table
plan torch._library.custom_ops.CustomOpDef: _opoverload
- torch._C: _select_conv_backend | small convolutions may round otherwise than whole ones

# capture
plan torch.utils: _pytree
plan torch.utils._python_dispatch: TorchDispatchMode _disable_current_modes
plan torch._C: DisableTorchFunction
plan torch._subclasses.fake_tensor: FakeTensor FakeTensorMode
plan torch._subclasses.functional_tensor: FunctionalTensor FunctionalTensorMode
plan torch: _from_functional_tensor _sync _to_functional_tensor
plan torch.fx.Node: _update_args_kwargs
plan torch.fx.experimental.proxy_tensor: get_proxy_mode get_proxy_slot make_fx
plan torch.fx.experimental.symbolic_shapes: ShapeEnv
plan torch.fx.experimental.symbolic_shapes.ShapeEnv: bound_sympy deferred_runtime_asserts
    evaluate_expr var_to_range
- torch: _numpy | programs that compute with NumPy's arrays
- torch._numpy: _dtypes _dtypes_impl | the same
- torch._C._nn: pad_sequence | pad_sequence of sizes that depend on values
plan torch._C._functorch: CVmapInterpreterPtr _add_batch_dim get_interpreter_stack get_unwrapped
    is_functorch_wrapped_tensor peek_interpreter_stack
- torch._C._functorch: maybe_get_level | manual regions
plan torch.autograd.graph: _engine_run_backward
- torch.autograd: _profiler_enabled | names of modules in a profile
plan torch.nn.Module: _backward_hooks _backward_pre_hooks _buffers _forward_hooks
    _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _modules
    _is_full_backward_hook _non_persistent_buffers_set _parameters
plan torch.Tensor: _base _make_wrapper_subclass _use_count _version
plan torch.UntypedStorage: _cdata
- torch._subclasses.fake_tensor: DataDependentOutputException DynamicOutputShapeException
    UnsupportedOperatorException | what cannot be captured raises torch's error in place of a
    ShardingError
- torch.fx.experimental.symbolic_shapes: GuardOnDataDependentSymNode | a branch on values raises
    torch's error in place of a ShardingError
- torch._C._autograd: _pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks
    _top_saved_tensors_default_hooks | a checkpoint around a call of the model
- torch.utils.checkpoint: _CachedTorchDispatchMode _VersionWrapper
    _checkpoint_without_reentrant_generator _is_compiling | recomputation in selective checkpoints,
    and in blocks of a stack or pipeline
- torch.utils.checkpoint: _checkpoint_without_reentrant_generator_impl 2.14 2.15 | recomputation in
    blocks of a stack or pipeline
- torch: _disable_dynamo | torch.compile of a program that has a wrapped module in it

# what library code sees during a capture
- torch.compiler: _is_compiling_flag _is_exporting_flag | models that ask whether they are being
    compiled
- torch._higher_order_ops.flex_attention: math_attention | flex_attention
- torch._higher_order_ops.associative_scan: generic_associative_scan |
    associative_scan along a sharded dimension sends rows in each of its steps
- torch.nn.attention.flex_attention: _validate_device _apply_kernel_options flex_attention_hop |
    flex_attention on CPUs
- torch.nn.modules.transformer: _detect_is_causal_mask | nn.Transformer with masks
- torch.distributions.Distribution: _validate_args | distributions that look at values
plan torch.nn.modules.batchnorm: _BatchNorm
- torch.nn.modules.batchnorm._BatchNorm: _check_input_dim | BatchNorm with momentum=None
- torch.nn.RNNBase: _flat_weights _flat_weights_names _update_flat_weights | LSTM, GRU and RNN
- torch.Tensor: _indices _values | sparse matrices

# programs that run
plan torch.ops: _c10d_functional
plan torch: _foreach_copy_
- torch: _log_softmax _softmax | a microsecond for each call of softmax
- torch: _grouped_mm | fast products of groups on GPUs
- torch: _fused_adam_ _fused_adamw_ | Adam and AdamW in train_step
- torch.distributed: _symmetric_memory | the carrier symmetric_memory
- torch._dynamo.utils: GmWrapper | a backward of Inductor holds its inputs
- torch._inductor.compile_fx: compile_fx | the same

# parameters as DTensors
parallelize torch.distributed.tensor.DTensor: _local_tensor _op_dispatcher _spec
parallelize torch.distributed.tensor.DTensor._op_dispatcher: _allow_implicit_replication
    _custom_op_handlers _try_replicate_spec_for_scalar_tensor
- torch.distributed.tensor.DTensor._op_dispatcher: _propagate_op_sharding_dispatch_slow_path 2.13
    2.14 2.15 | operations on parameters for which DTensor has no layout
- torch.distributed.fsdp._fully_shard: _fsdp_init | fully_shard around a wrapped module raises
    torch's error in place of a ShardingError
- torch.distributed.tensor.placement_types: _StridedShard | weights are not stored by the parts into
    which forward cuts their products
- torch.distributed: _state_dict_utils | set_model_state_dict with whole tensors, for weights that
    are stored by parts
- torch.optim: _muon | Muon's step gathers each matrix for each product
parallelize torch.nn.parameter._ParameterMeta: _is_param
plan torch.nn.modules.module: _global_backward_hooks _global_backward_pre_hooks
    _global_forward_hooks _global_forward_pre_hooks
- torch.distributed.distributed_c10d: _get_default_store _set_pg_timeout | ranks that wait do not
    say for whom
- torch.distributed.ProcessGroup: _get_backend | the limit of a wait
- torch.distributed._functional_collectives: AsyncCollectiveTensor | redistribute(async_op=True):
    the error of its wait is torch's
- torch._C._distributed_c10d.Backend.Options: _timeout | the same
parallelize torch.Tensor: _backward_hooks _post_accumulate_grad_hooks
parallelize torch._C: _storage_Use_Count _will_engine_execute_node
- torch.optim.Optimizer: _patch_step_function | 70 ms of parallelize, where there is no optimizer
- torch.nn.utils.clip_grad: _clip_grads_with_norm_ _get_total_norm | time of clip_grad_norm_

# torch_xla
xla torch_xla._XLAC: _get_xla_sharding_spec _get_xla_tensors_hlo _global_tensor_from_cpu_shards
    _xla_annotate_custom_sharding _xla_get_runtime_devices _xla_get_spmd_config_is_locked 2.9
"""


def _apis(row: str) -> list[PrivateApi]:
    """Parse a row: an API for each name, all attributes on one owner."""
    use, owner, *words = row.partition(" | ")[0].replace(": ", " ").split()
    names = [word for word in words if not word[0].isdigit()]
    versions = tuple(words[len(names) :]) or CHECKED
    needed_for = {"plan": PLAN, "parallelize": PARALLELIZE, "xla": XLA, "-": NOTHING}[use]
    lost = row.partition(" | ")[2]
    return [PrivateApi(f"{owner}.{name}", needed_for, lost, versions) for name in names]


TABLE: tuple[PrivateApi, ...] = tuple(
    api
    for row in _ROWS.replace("\n    ", " ").splitlines()
    if row and not row.startswith("#")
    for api in _apis(row)
)
_BY_NAME = {api.name: api for api in TABLE}


@cache
def release(version: str) -> tuple[int, int]:
    """Split a version into (major, minor)."""
    major, minor, *_ = version.partition("+")[0].split(".")
    return int(major), int(minor)


def lookup(api: PrivateApi) -> Any:
    """Return a row's object. Raise AttributeError or ImportError if this torch lacks it."""
    first, *rest = api.path.split(".")
    owner, path = importlib.import_module(first), first
    for name in rest[:-1]:
        path = f"{path}.{name}"
        owner = _submodule_or_attribute(owner, name, path)
    # Attributes that __init__ sets are on no class, so instances are judged by their code.
    if hasattr(owner, rest[-1]) or not isinstance(owner, type):
        return _submodule_or_attribute(owner, rest[-1], api.path)
    return _check_instance_attribute(owner, rest[-1])


def _submodule_or_attribute(owner: object, name: str, path: str) -> object:
    """Return the submodule with that name, or else the attribute.

    torch._higher_order_ops has both for flex_attention: a function hides the module.
    """
    if hasattr(owner, "__path__"):  # a package
        try:
            return importlib.import_module(path)
        except ImportError:
            pass
    return getattr(owner, name)


def _check_instance_attribute(owner: type, name: str) -> None:
    """Raise an AttributeError if a class's instances have no such attribute.

    They have it if the class annotates it or its methods mention it.
    """
    methods = [getattr(method, "__code__", None) for method in vars(owner).values()]
    mentioned = {
        n
        for code in methods
        if code is not None
        for n in (*code.co_names, *code.co_consts)
        if isinstance(n, str)
    }
    if name not in getattr(owner, "__annotations__", {}) and name not in mentioned:
        raise AttributeError(name)


def is_there(api: PrivateApi) -> bool:
    """True if this torch has a row's API."""
    try:
        lookup(api)
    except (AttributeError, ImportError):
        return False
    return True


class _Missing(type):
    """Metaclass for the classes that stand for missing APIs."""

    api: PrivateApi

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise error_without(cls.api)

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise error_without(cls.api)


def is_missing(imported: object) -> bool:
    """True if an object imported from here stands for a missing API."""
    return isinstance(imported, _Missing)


def error_without(*apis: PrivateApi) -> ShardingError:
    """Return the error for using missing APIs."""
    names = ", ".join(a.path for a in apis)
    lost = next((a.needed_for or a.lost for a in apis if a.needed_for or a.lost), "")
    return ShardingError.here(
        f"torch {torch.__version__} lacks {names}",
        why=f"needed for {lost}" if lost else None,
        fix=f"install a torch that torchgspmd was checked on: {', '.join(CHECKED)}; `python -m "
        "torchgspmd doctor` says what is missing",
    )


def __getattr__(name: str) -> Any:
    """Return the API with that name, or the class that stands for it."""
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = _BY_NAME[name]
    try:
        result = lookup(api)
    except (AttributeError, ImportError):
        result = _Missing(name, (), {"api": api})
    # The next import finds the name without this function.
    globals()[name] = result
    return result


def has(path: str) -> bool:
    """True if this torch has the API with that path, for code that works without it."""
    return is_there(next(api for api in TABLE if api.path == path))


@cache
def missing(needed_for: str) -> tuple[PrivateApi, ...]:
    """Return the rows that this torch lacks and that something cannot work without."""
    return tuple(api for api in TABLE if api.needed_for == needed_for and not is_there(api))


def require(*needed_for: str) -> None:
    """Raise a ShardingError if an API is missing. needed_for: PLAN, PARALLELIZE."""
    apis = tuple(api for use in needed_for for api in missing(use))
    if apis:
        raise error_without(*apis)


def is_newer() -> bool:
    """True if this torch is newer than the newest checked one."""
    return release(torch.__version__) > max(map(release, CHECKED))


def is_checked() -> bool:
    """True if the tests pass on this torch release."""
    return release(torch.__version__) in map(release, CHECKED)


@cache
def check_torch(*needed_for: str) -> None:
    """Raise a ShardingError if this torch lacks a needed API. Results are cached.

    Rank 0 logs one line if this torch is newer than the checked ones.
    """
    require(*needed_for)
    _warn_if_newer()


@cache
def _warn_if_newer() -> None:
    if is_newer() and os.environ.get("RANK", "0") == "0":
        # Without the build's suffix, such as +cu126, which says nothing about APIs.
        version = ".".join(map(str, release(torch.__version__)))
        logging.getLogger("torchgspmd").warning(
            "torch %s is newer than what torchgspmd was checked on", version
        )
