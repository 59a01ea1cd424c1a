"""``SyncBatchNorm`` over torch's, with apex's layouts, and on every device that processes can talk about."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...torch_internals import BatchNorm, InstanceNorm, check_input_dim, check_non_zero_input_channels
from ..errors import AmpAssertionError

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(BatchNorm):
    """Batch norm whose statistics are those of all processes' batches; torch's kernels where it has any.

    It is no ``torch.nn.SyncBatchNorm``, which torch's data parallelism refuses on a processor.

    Args:
        num_features: Channels.
        eps: Added to the variance.
        momentum: Of the running statistics; None averages them all.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether there are running statistics.
        process_group: The processes; all if None.
        channel_last: Channels are the input's last dimension.
        fuse_relu: Apply ReLU to the output.

    Example:
        >>> layer = SyncBatchNorm(4, channel_last=True)
        >>> layer(torch.ones(2, 3, 3, 4)).shape
        torch.Size([2, 3, 3, 4])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group, self.channel_last, self.fuse_relu = process_group, channel_last, fuse_relu

    _check_input_dim: Any = check_input_dim
    _check_non_zero_input_channels: Any = check_non_zero_input_channels

    def _specify_process_group(self, process_group: Any) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalized input, plus ``z`` if given, past ReLU with ``fuse_relu``; in the input's layout.

        Args:
            input: Shape (N, C), (N, C, ...), or (N, ..., C) with ``channel_last``.
            z: The input's shape.
        """
        moves = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if moves else input
        if not self._has_others():
            out = super().forward(x)
        else:
            out = nn.SyncBatchNorm.forward(self, x) if _is_torchs(x) else self._joint(x)  # type: ignore[arg-type]
        out = out.movedim(1, -1) if moves else out
        if z is not None:
            out = out + z
        return F.relu(out) if self.fuse_relu else out

    def _has_others(self) -> bool:
        group = self.process_group or None
        return self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1

    def _joint(self, x: Tensor) -> Tensor:
        """Normalize by the statistics of all processes, in float32: one sum for the mean, one for the variance."""
        self._check_input_dim(x)
        wide = x.float() if x.dtype.itemsize < 4 else x
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = wide.new_full((1,), x.numel() / x.shape[1])
        sums = _sum(torch.cat([wide.sum(dims), count]), self.process_group)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centered = wide - mean.view(shape)
        var = _sum(centered.square().sum(dims), self.process_group) / total
        self._track(mean.detach(), var.detach(), total)
        out = centered * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.to(out.dtype).view(shape) + self.bias.to(out.dtype).view(shape)
        result: Tensor = out.to(x.dtype)
        return result

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_((var * (total / (total - 1))).to(self.running_var.dtype), weight)


def _is_torchs(x: Tensor) -> bool:
    """Tell whether torch's own layer synchronizes tensors of this device: accelerators' only."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and x.device.type == accelerator.type


class _Sum(torch.autograd.Function):
    """The sum over the processes; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum(value: Tensor, group: Any) -> Tensor:
    total: Tensor = _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return total


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace a model's batch norm layers by ``SyncBatchNorm``; parameters and buffers stay the same objects.

    Args:
        module: The model, changed in place, unless it is a batch norm layer itself.
        process_group: The processes whose statistics count; all if None.
        channel_last: Channels are the last dimension of the layers' inputs.

    Example:
        >>> model = convert_syncbn_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    if isinstance(module, BatchNorm) and not isinstance(module, InstanceNorm):
        made = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        made._parameters.update(module._parameters)
        made._buffers.update(module._buffers)
        return made.train(module.training)
    for name, child in module.named_children():
        converted = convert_syncbn_model(child, process_group, channel_last)
        if converted is not child:
            setattr(module, name, converted)
    return module


def create_syncbn_process_group(group_size: int) -> Any:
    """Split all processes into groups of one size, for statistics; return this process's, or None for 0.

    Args:
        group_size: Processes in a group; divides the number of processes. 0 is all of them.

    Raises:
        AmpAssertionError: The processes can't be split so.

    Example:
        >>> create_syncbn_process_group(0) is None
        True
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if world < group_size or world % group_size != 0:
        raise AmpAssertionError(f"{world} processes can't be split into groups of {group_size}.")
    mine = None
    for start in range(0, world, group_size):
        ranks = range(start, start + group_size)
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    return mine
