"""``DistributedDataParallel`` with apex's arguments over torch's, ``Reducer``, and ``flat_dist_call``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_internals import (
    FORWARD_SYNC_BUFFERS,
    SYNC_MODULE_STATES,
    execution_engine,
    flatten_dense_tensors,
    foreach_copy_,
    unflatten_dense_tensors,
)
from ..errors import AmpNotImplementedError, AmpValueError

__all__ = ["DistributedDataParallel", "Reducer", "flat_dist_call"]

_MEBIBYTE = 2.0**20


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with apex's arguments; buffers aren't broadcast in forward passes, as in apex.

    Args:
        module: The model, on its device.
        message_size: Elements after which a bucket of gradients is sent.
        delay_allreduce: Send all gradients together after the backward pass: for models that are called several times,
            not through ``forward``, in parts, or that are changed after this.
        shared_param: Refused, as in apex.
        allreduce_trigger_params: Parameters whose gradients let a bucket go. torch decides that itself.
        retain_allreduce_buffers: apex kept the buckets as ``allreduce_buffers`` then; here that is refused when read.
        allreduce_always_fp32: Send and add gradients in float32.
        num_allreduce_streams: torch has streams of its own.
        allreduce_communicators: Process groups, of which the first is taken, and streams.
        gradient_average: Divide by the number of processes.
        gradient_predivide_factor: Divide by this before adding, and by the rest after.
        gradient_average_split_factor: The old name of ``gradient_predivide_factor``.
        prof: Marks for a profiler; torch's has its own.

    Raises:
        AmpValueError: ``shared_param``, or ``allreduce_trigger_params`` with ``delay_allreduce``.

    Example:
        >>> import tempfile
        >>> store = tempfile.NamedTemporaryFile(delete=False).name
        >>> dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(2, 1), delay_allreduce=True)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.module.bias.grad
        tensor([1.])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise AmpValueError("shared_param is gone, as in apex: say delay_allreduce=True instead.")
        if allreduce_trigger_params is not None and delay_allreduce:
            raise AmpValueError("allreduce_trigger_params has no meaning with delay_allreduce=True: leave one out.")
        if gradient_average_split_factor is not None:
            gradient_predivide_factor = gradient_average_split_factor
        size = max((p.element_size() for p in module.parameters()), default=4)
        options: dict[str, Any] = {"bucket_cap_mb": message_size * size / _MEBIBYTE, FORWARD_SYNC_BUFFERS: False}
        if allreduce_communicators:
            options["process_group"] = allreduce_communicators[0][0]
        super().__init__(module, **options)
        self.delay_allreduce = delay_allreduce
        self._reduction = _Reduction(
            self.process_group, gradient_average, gradient_predivide_factor, allreduce_always_fp32
        )
        self._is_allreducing, self._is_queued = True, False
        if delay_allreduce:
            self.require_backward_grad_sync = False
            for p in module.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._queue)
        elif not self._reduction.is_torchs():
            # torch reads a hook's annotations, and as strings it takes none.
            self.register_comm_hook(self._reduction, lambda reduction, bucket: reduction.hook(bucket))

    @property
    def allreduce_buffers(self) -> Any:
        """The buckets that apex kept.

        Raises:
            AmpNotImplementedError: Always.
        """
        raise AmpNotImplementedError(
            "apex.parallel.DistributedDataParallel keeps no allreduce_buffers here: read the gradients of parameters."
        )

    def disable_allreduce(self) -> None:
        """Send nothing in the backward passes from now on."""
        self._allow(False)

    def enable_allreduce(self) -> None:
        """Send gradients again, from the next forward pass on."""
        self._allow(True)

    def _allow(self, is_on: bool) -> None:
        self._is_allreducing = is_on
        self.require_backward_grad_sync = is_on and not self.delay_allreduce

    def _queue(self, p: Tensor) -> None:
        """Have one reduction after the backward pass that has given a parameter a gradient."""
        if self._is_allreducing and not self._is_queued:
            self._is_queued = True
            execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        self._is_queued = False
        self._reduction.reduce([p.grad for p in self.module.parameters() if p.grad is not None])


class _Reduction:
    """How gradients of several processes become one: apex's options, on a flat bucket.

    Args:
        group: The process group.
        average: Divide by the number of processes.
        predivide: Of that, what to divide by before adding.
        always_float32: Send and add in float32.
    """

    def __init__(self, group: Any, average: bool, predivide: float, always_float32: bool) -> None:
        self.group, self.average, self.predivide, self.always_float32 = group, average, predivide, always_float32

    def is_torchs(self) -> bool:
        """Tell whether torch's own reduction does just that."""
        return self.average and self.predivide == 1.0 and not self.always_float32

    def before(self, flat: Tensor) -> Tensor:
        """Return what is sent for a bucket."""
        sent = flat.float() if self.always_float32 else flat
        return sent / self.predivide if self.predivide != 1.0 else sent

    def after(self, total: Tensor, flat: Tensor) -> Tensor:
        """Write what was received into the bucket, and return it."""
        factor = self.predivide / dist.get_world_size(self.group) if self.average else 1.0
        return flat.copy_(total * factor if factor != 1.0 else total)

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce one of torch's buckets: a communication hook."""
        flat = bucket.buffer()
        sent = self.before(flat)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: self.after(done.value()[0], flat))
        return future

    @torch.no_grad()
    def reduce(self, grads: list[Tensor]) -> None:
        """Reduce gradients, flattened by dtype and device."""

        def call(flat: Tensor) -> None:
            sent = self.before(flat)
            sent = sent.clone() if sent is flat else sent
            dist.all_reduce(sent, group=self.group)
            self.after(sent, flat)

        _call_flat(grads, call)


def _call_flat(tensors: Iterable[Tensor], call: Callable[[Tensor], Any]) -> None:
    """Call with tensors flattened by dtype and device, and copy the results back."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        flat = flatten_dense_tensors(alike)
        call(flat)
        foreach_copy_(alike, list(unflatten_dense_tensors(flat, alike)))


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Make a collective call for many tensors at once; ``all_reduce`` averages.

    Args:
        tensors: Tensors, changed in place.
        call: ``torch.distributed.all_reduce``, ``broadcast`` or another that works in place.
        extra_args: Further arguments of the call.
    """

    def make(flat: Tensor) -> None:
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()

    with torch.no_grad():
        _call_flat(tensors, make)


class Reducer:
    """Averages gradients when asked to; for training loops that say when.

    Args:
        module_or_grads_list: A module, whose parameters are broadcast from the first process now and whose gradients
            ``reduce`` averages; or a list of gradients.
    """

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        if isinstance(module_or_grads_list, nn.Module):
            self.module: nn.Module | None = module_or_grads_list
            # By torch's own name, where masters that amp keeps go along with the parameters.
            getattr(*SYNC_MODULE_STATES)(
                module=self.module,
                process_group=dist.group.WORLD,
                broadcast_bucket_size=250 * 2**20,
                src=0,
                params_and_buffers_to_ignore=[],
                broadcast_buffers=False,
            )
        else:
            self.module, self.grads = None, list(module_or_grads_list)

    def reduce(self) -> None:
        """Average the gradients over the processes."""
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            flat_dist_call([p.grad for p in self.module.parameters() if p.grad is not None], dist.all_reduce)
