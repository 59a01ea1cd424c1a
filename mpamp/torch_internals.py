"""torch's private names that mpamp uses, each once and by torch's own word for it, and what differs by torch's version.

A name is private where a part of its path begins with an underscore, or is ``torch.fx.experimental``. The rest of mpamp
imports it from here, so a new torch is looked at in this file alone: a test asks torch for each, in the range of
versions that is said here, and for no other. What isn't said to be "from" a version is there from 2.8 to 2.14.

Nothing here imports what ``import torch`` doesn't: what is bigger is imported by functions, when it is needed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.jit._builtins
import torch.nn.parallel.distributed
import torch.utils._foreach_utils
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint
from torch import _C, _guards, _ops, _utils
from torch._C import _autograd, _functorch
from torch._C._dynamo import eval_frame
from torch._subclasses import fake_tensor, functional_tensor
from torch.autograd import forward_ad, grad_mode
from torch.fx.experimental import proxy_tensor

Place = tuple[Any, str]
"""An attribute that mpamp replaces: who has it, and its name there."""


def _since(release: str, owner: Any, name: str) -> Any:
    """Return an attribute that torch has from a release on; None before."""
    return getattr(owner, name, None)


def _where_built(owner: Any, name: str) -> Any:
    """Return an attribute that some builds of torch have; None in others."""
    return getattr(owner, name, None)


# -- The dispatcher: keys, and which ops have a kernel at one ------------------------------------------

DispatchKey = _C.DispatchKey
DispatchKeySet = _C.DispatchKeySet
dispatch_key_name = _C._dispatch_key_name
dispatch_key_parse = _C._dispatch_key_parse
dispatch_key_for_device = _C._dispatch_key_for_device
dispatch_keys = _C._dispatch_keys  # of a tensor
dispatch_keyset_full_after = _C._dispatch_keyset_full_after  # what a kernel redispatches to
dispatch_get_all_op_names = _C._dispatch_get_all_op_names
dispatch_get_registrations_for_dispatch_key = _C._dispatch_get_registrations_for_dispatch_key
dispatch_has_backend_fallback = _C._dispatch_has_backend_fallback
dispatch_has_kernel = _C._dispatch_has_kernel  # whether an op has any: some are TorchScript's own
dispatch_has_kernel_for_dispatch_key = _C._dispatch_has_kernel_for_dispatch_key
dispatch_kernel_for_dispatch_key_is_fallthrough = _C._dispatch_kernel_for_dispatch_key_is_fallthrough
get_kernel: Any = _since("2.9", torch.library, "get_kernel")  # the kernel that mpamp's goes on top of
get_privateuse1_backend_name = _C._get_privateuse1_backend_name

# -- The calling thread's keys: which are excluded is what says that autocast is off -------------------

dispatch_tls_is_dispatch_key_excluded = _C._dispatch_tls_is_dispatch_key_excluded
dispatch_tls_set_dispatch_key_excluded = _C._dispatch_tls_set_dispatch_key_excluded
dispatch_tls_is_dispatch_key_included = _C._dispatch_tls_is_dispatch_key_included
dispatch_tls_set_dispatch_key_included = _C._dispatch_tls_set_dispatch_key_included
ForceDispatchKeyGuard = _C._ForceDispatchKeyGuard

# -- Ops and their schemas -----------------------------------------------------------------------------

OpOverload = _ops.OpOverload
OpOverloadPacket = _ops.OpOverloadPacket
HigherOrderOperator = _ops.HigherOrderOperator
OpNamespace = _ops._OpNamespace
higher_order_ops = _ops._higher_order_ops  # all that there are, by name
jit_get_schemas_for_operator = _C._jit_get_schemas_for_operator
should_allow_numbers_as_tensors = _C._should_allow_numbers_as_tensors
get_builtin_table: Callable[[], dict[int, str]] = (
    torch.jit._builtins._get_builtin_table
)  # which op TorchScript takes a function for
linear = _C._nn.linear  # reaches its overload sooner than torch.ops does
amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt_ = torch._foreach_sqrt_
foreach_sub_ = torch._foreach_sub_
set_grad_enabled = _C._set_grad_enabled  # as exported programs have it

# -- Dispatch modes, torch functions, transforms and tracers: who sees the calls of this thread --------

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
TorchDispatchModeKey = _C._TorchDispatchModeKey
len_torch_dispatch_stack = _C._len_torch_dispatch_stack
get_dispatch_mode = _C._get_dispatch_mode
get_current_dispatch_mode_stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
disable_current_modes = torch.utils._python_dispatch._disable_current_modes
autograd_would_have_decomposed: Any = _since("2.10", torch.utils._python_dispatch, "autograd_would_have_decomposed")
DisableTorchDispatch = _C._DisableTorchDispatch
DisableTorchFunction = _C.DisableTorchFunction
DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass
is_torch_function_mode_enabled = _C._is_torch_function_mode_enabled
get_current_function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
peek_interpreter_stack = _functorch.peek_interpreter_stack
maybe_current_level = _functorch.maybe_current_level
is_functorch_wrapped_tensor = _functorch.is_functorch_wrapped_tensor
is_legacy_batchedtensor = _functorch.is_legacy_batchedtensor
are_functorch_transforms_active = _C._are_functorch_transforms_active
is_tracing = _C._is_tracing  # torch.jit.trace
get_tracing_state = _C._get_tracing_state
set_tracing_state = _C._set_tracing_state  # type: ignore[attr-defined]
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
unset_fake_temporarily = fake_tensor.unset_fake_temporarily
FunctionalTensorMode = functional_tensor.FunctionalTensorMode
PreDispatchTorchFunctionMode = proxy_tensor.PreDispatchTorchFunctionMode
ProxyTorchDispatchMode = proxy_tensor.ProxyTorchDispatchMode
CachingTorchDispatchMode = torch.utils.checkpoint._CachingTorchDispatchMode  # selective checkpoints' forward
CachedTorchDispatchMode = torch.utils.checkpoint._CachedTorchDispatchMode  # their recompute
TracingContext = _guards.TracingContext
enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
exit_autocast: Callable[[Any], None] = torch.amp.autocast_mode._exit_autocast
UnmanagedAutocast: Any = _since("2.12", torch.amp.autocast_mode, "_UnmanagedAutocast")
"""What compiled code enters; before, it is torch.autocast itself, and told by who calls it."""

# -- Autograd ------------------------------------------------------------------------------------------

current_autograd_node = _C._current_autograd_node
current_graph_task_id = _C._current_graph_task_id  # -1 outside of backward passes
execution_engine: Any = torch.autograd.Variable._execution_engine
top_saved_tensors_default_hooks = _autograd._top_saved_tensors_default_hooks
push_saved_tensors_default_hooks = _autograd._push_saved_tensors_default_hooks
pop_saved_tensors_default_hooks = _autograd._pop_saved_tensors_default_hooks
unsafe_preserve_version_counter = grad_mode._unsafe_preserve_version_counter
HIDES_HELD_TENSORS = torch.__version__ < torch.torch_version.TorchVersion("2.10")
"""Whether the garbage collector isn't told what tensors that a graph holds refer to, their class included."""


def forward_ad_level() -> int:
    """Return the level of forward-mode AD; negative outside. torch keeps it as a module's variable."""
    return forward_ad._current_level


FUNCTION_APPLY: Any = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""What calls a Function's forward, and knows the Function; None from 2.14 on, where that is C++ and has no frame."""
RUN_BACKWARD: Place = torch.autograd, "_engine_run_backward"
GET_DATA_ATTR: Place = _autograd, "_get_data_attr"  # what Dynamo writes into a graph for tensor.data
CHECKPOINT_SETTINGS: Place = torch.utils.checkpoint, "_get_autocast_kwargs"
CHECKPOINT_GENERATOR: Place = (
    torch.utils.checkpoint,
    "_checkpoint_without_reentrant_generator_impl"  # from 2.14 on the other calls it
    if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else "_checkpoint_without_reentrant_generator",
)

# -- Tensors, storages and trees of them ---------------------------------------------------------------

TensorBase: Any = _C.TensorBase
StorageBase = torch.storage._StorageBase
make_subclass: Any = torch.Tensor._make_subclass
storage_use_count: Callable[[int], int] = _C._storage_Use_Count
flatten_dense_tensors: Callable[[list[torch.Tensor]], torch.Tensor] = _utils._flatten_dense_tensors
unflatten_dense_tensors: Callable[[torch.Tensor, list[torch.Tensor]], tuple[torch.Tensor, ...]] = (
    _utils._unflatten_dense_tensors
)
group_tensors_by_device_and_dtype = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
get_fused_kernels_supported_devices = torch.utils._foreach_utils._get_fused_kernels_supported_devices
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_map_only = torch.utils._pytree.tree_map_only
register_constant = torch.utils._pytree.register_constant  # Dynamo guards on objects of such a class by value
SUPPORTED_NODES = torch.utils._pytree.SUPPORTED_NODES

# -- Modules, scalers and data parallelism -------------------------------------------------------------

call_impl = torch.nn.modules.module.Module._call_impl
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
check_input_dim: Any = torch.nn.modules.batchnorm.SyncBatchNorm._check_input_dim
check_non_zero_input_channels: Any = torch.nn.modules.batchnorm.SyncBatchNorm._check_non_zero_input_channels
refresh_per_optimizer_state = torch.amp.grad_scaler._refresh_per_optimizer_state
broadcast_coalesced: Any = _where_built(torch.distributed, "_broadcast_coalesced")
REPLICATE: Place = torch.nn.Module, "_replicate_for_data_parallel"
SYNC_MODULE_STATES: Place = torch.nn.parallel.distributed, "_sync_module_states"
SYNC_BATCH_NORM_HANDLE: Place = torch.nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle"
AVAILABLE_DEVICE_TYPE: Place = sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type"
_DDP_ARGUMENTS = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
FORWARD_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"
"""DistributedDataParallel's argument: the former from 2.13 on."""

# -- Builds and processors -----------------------------------------------------------------------------

cxx_flags = _C._cxx_flags
GLIBCXX_USE_CXX11_ABI = _C._GLIBCXX_USE_CXX11_ABI
cuda_get_device_count: Callable[[], int] = _where_built(_C, "_cuda_getDeviceCount")
cuda_get_current_raw_stream: Any = _where_built(_C, "_cuda_getCurrentRawStream")
cuda_is_current_stream_capturing: Any = _where_built(_C, "_cuda_isCurrentStreamCapturing")
is_avx512_bf16_supported = torch.cpu._is_avx512_bf16_supported
is_amx_tile_supported = torch.cpu._is_amx_tile_supported
is_amx_fp16_supported = torch.cpu._is_amx_fp16_supported

# -- torch.compile: Dynamo is imported by whoever compiles, never by mpamp -----------------------------

FrameAction = eval_frame._FrameAction
FrameExecStrategy = eval_frame._FrameExecStrategy
set_code_exec_strategy = eval_frame.set_code_exec_strategy
DYNAMO = "torch._dynamo"
EVAL_FRAME = "torch._dynamo.eval_frame"
SET_EVAL_FRAME = ("set_eval_frame", "_maybe_set_eval_frame")
"""What sets the thread's callback for frames, in that module; the latter is the same function in some builds."""
_WRAPPERS = ("compile_wrapper", "_fn")
"""What torch's versions call the function that ``torch.compile`` gives."""
CTX_MANAGER = "torch._dynamo.variables.ctx_manager"


def begins_compiled_code(frame: FrameType) -> bool:
    """Tell whether a frame is of a compiled function that begins, rather than of one left out of compiled code."""
    if frame.f_code.co_name not in _WRAPPERS:
        return False
    from torch._dynamo.eval_frame import DisableContext, _stance, _TorchDynamoContext

    context = frame.f_locals.get("self")
    is_compiled = isinstance(context, _TorchDynamoContext) and not isinstance(context, DisableContext)
    return is_compiled and "prior" not in frame.f_locals and _stance.stance != "force_eager"


def reset_dynamo() -> None:
    """Have Dynamo compile everything anew; what isn't imported, or still being so, has compiled nothing."""
    reset = getattr(sys.modules.get(DYNAMO), "reset", None)
    if reset is not None:
        reset()


def forget_traced_names() -> None:
    """Have Dynamo, where it has been imported, look up again which function each name of torch's is."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()


def type_handlers() -> tuple[list[dict[type, Any]], dict[type, Any]]:
    """Return by what Dynamo finds what stands for an object of a type: two tables, and that of those without source.

    Raises:
        AttributeError, ImportError, TypeError: This Dynamo is another than those known.
    """
    from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder

    impl: Any = VariableBuilder._type_dispatch_impl
    tables = [impl(flag) for flag in (True, False)]
    return tables, SourcelessBuilder._type_handlers  # type: ignore[attr-defined]


def equals_match() -> Any:
    """Return Dynamo's guard of a value by equality."""
    from torch._dynamo.guards import GuardBuilder

    return GuardBuilder.EQUALS_MATCH


def context_variable() -> Any:
    """Return the class of what stands for a context while Dynamo traces."""
    from torch._dynamo.variables import ContextWrappingVariable

    return ContextWrappingVariable


def attribute_method(variable: Any) -> str:
    """Return the name of the method by which such a class gives attributes: another from 2.14 on."""
    return "tp_getattro_impl" if hasattr(variable, "tp_getattro_impl") else "var_getattr"


def autocast_variable() -> Any:
    """Return the class of what stands for a ``torch.autocast`` there."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    return AutocastModeVariable


def constant_variable(value: Any) -> Any:
    """Return what stands for a constant there."""
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


def restart_analysis(reason: str) -> Exception:
    """Return what, raised while Dynamo traces, has it begin again."""
    from torch._dynamo.exc import RestartAnalysis

    return RestartAnalysis(restart_reason=reason)


def inductor_config() -> Any:
    """Return the settings of ``torch.compile``'s default backend."""
    from torch._inductor import config

    return config


# -- Default devices -----------------------------------------------------------------------------------


def device_constructors() -> Any:
    """Return torch's functions that make tensors; torch looks for them once, and remembers."""
    from torch.utils._device import _device_constructors

    return _device_constructors()


def device_context() -> Any:
    """Return the class of what ``torch.set_default_device`` enters."""
    from torch.utils._device import DeviceContext

    return DeviceContext


# -- Attributes that are used where the objects are, by the module of torch's that says them -----------

ATTRIBUTES = {
    "torch._C": (  # tensors, storages and autograd's nodes
        "_cdata",
        "_fix_weakref",
        "_is_view",
        "_saved_other",
        "_use_count",
        "_version",
        "_wrapped_number",
    ),
    "torch._tensor": ("_post_accumulate_grad_hooks",),
    "torch.nn.parameter": ("_is_param",),
    "torch.nn.modules.module": ("_apply", "_compiled_call_impl", "_modules"),
    "torch.distributed.fsdp._flat_param": ("_is_flat_param", "_saved_grad_shard"),
    "torch._ops": (
        "_can_decompose",
        "_dispatch_cache",
        "_handle",
        "_op",
        "_op_dk",
        "_qualified_op_name",
        "_schema",
    ),
    "torch._library.custom_ops": ("_qualname",),
    "torch.library": ("_destroy",),
    "torch.optim.optimizer": ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
    "torch.optim.sgd": ("_step_supports_amp_scaling",),
    "torch.optim.lr_scheduler": ("_opt_called", "_wrapped_by_lr_sched"),
    "torch.amp.autocast_mode": ("_cache_enabled", "_enabled", "_fwd_used_autocast"),
    "torch.amp.grad_scaler": (  # mpamp's scaler derives from torch's, and torch's code asks it for these
        "_backoff_factor",
        "_check_inf_per_device",
        "_check_scale_growth_tracker",
        "_get_growth_tracker",
        "_get_scale_async",
        "_growth_factor",
        "_growth_interval",
        "_growth_tracker",
        "_init_growth_tracker",
        "_init_scale",
        "_lazy_init_scale_growth_tracker",
        "_maybe_opt_step",
        "_per_optimizer_states",
        "_scale",
        "_unscale_grads_",
    ),
    "torch._dynamo.decorators": ("_dynamo_marked_constant", "_torchdynamo_disable", "_torchdynamo_disable_msg"),
    "torch._dynamo.eval_frame": ("_orig_mod",),
    "torch._dynamo.variables.base": ("_nonvar_fields",),
    "torch.cuda": ("_device_count_nvml", "_lazy_init"),  # of an absent device's namespace, which another answers for
    "torch.cuda.memory": ("_dump_snapshot", "_record_memory_history", "_snapshot"),
}
