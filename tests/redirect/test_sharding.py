"""Device meshes, DTensors, FSDP and DDP's check of its model, in one process, under ``redirect("cpu")``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpamp.errors import RedirectError
from mpamp.redirect import redirect

if not torch.distributed.is_available() or torch.cuda.is_available():
    pytest.skip("needs torch.distributed, and no CUDA", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP warns of one process, and of its own future


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("store")) / "store"
    with redirect("cpu"):
        device = torch.device("cuda:0")
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device)
        yield
        dist.destroy_process_group()


MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "init_device_mesh": lambda: init_device_mesh("cuda", (1,)),
    "of torch.distributed, by name": lambda: dist.init_device_mesh(device_type="cuda", mesh_shape=(1,)),
    "of two dimensions": lambda: init_device_mesh("cuda", (1, 1), mesh_dim_names=("data", "tensor"))["tensor"],
    "a mesh": lambda: DeviceMesh("cuda", [0]),
    "a mesh by name": lambda: DeviceMesh(device_type="cuda", mesh=torch.arange(1)),
    "of a group": lambda: DeviceMesh.from_group(dist.group.WORLD, "cuda"),
    "of what is here": lambda: init_device_mesh("cpu", (1,)),
}


@pytest.mark.parametrize("kind", MESHES)
def test_meshes_are_of_the_present_device(kind: str) -> None:
    mesh = MESHES[kind]()
    assert mesh.device_type == "cpu"
    x = distribute_tensor(torch.ones(4, 4, device="cuda"), mesh, [Shard(0)])
    assert (x @ x).full_tensor().tolist() == [[4.0] * 4] * 4
    assert zeros(3, device_mesh=mesh, placements=[Replicate()]).device.type == "cpu"


def _fsdp(*args: Any, **kwargs: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(nn.Linear(8, 8).cuda(), *args, **kwargs)


def _wrapped() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    return FullyShardedDataParallel(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0)


def _offloaded() -> nn.Module:
    from torch.distributed.fsdp import CPUOffload

    return _fsdp(cpu_offload=CPUOffload(offload_params=True))


def _fully_sharded(**kwargs: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(8, 8).cuda(), **kwargs)


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "FSDP": _fsdp,
    "FSDP of an index": lambda: _fsdp(device_id=torch.cuda.current_device()),
    "FSDP of a device": lambda: _fsdp(device_id=torch.device("cuda:0"), use_orig_params=True),
    "FSDP by place": lambda: _fsdp(None, None, None, None, None, None, None, None, torch.device("cuda", 0)),
    "FSDP of a mesh": lambda: _fsdp(device_mesh=init_device_mesh("cuda", (1,))),
    "FSDP that offloads": _offloaded,
    "FSDP that wraps": _wrapped,
    "fully_shard": _fully_sharded,
    "fully_shard of a mesh": lambda: _fully_sharded(mesh=init_device_mesh("cuda", (1,))),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_models_train(kind: str) -> None:
    model = SHARDED[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 8, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_ddp_takes_a_model_with_synchronized_batch_norm() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(layers).cuda(), device_ids=[0])
    model(torch.rand(2, 3, 8, 8).cuda()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_groups_are_not_split() -> None:
    with pytest.raises(RedirectError, match=r"split_group can't be sent to 'cpu'.*Use torch\.distributed\.new_group"):
        dist.split_group(split_ranks=[[0]])
    dist.new_group([0], backend=dist.get_default_backend_for_device("cuda"))


class _Marked(torch.Tensor):
    """A subclass, of which torch asks its functions twice."""


@pytest.mark.parametrize("kind", [torch.Tensor, _Marked, nn.Parameter])
def test_the_type_of_a_subclass(kind: Any) -> None:
    x = kind(torch.ones(2).cuda()) if kind is nn.Parameter else torch.ones(2).cuda().as_subclass(kind)
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type("torch.cuda.HalfTensor").dtype is torch.float16


def test_the_type_of_what_a_cast_models_state_dict_holds() -> None:
    from mpamp.apex import amp

    model = nn.Linear(2, 2).cuda()
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    try:
        assert {value.type() for value in model.state_dict().values()} == {"torch.cuda.FloatTensor"}
    finally:
        amp.shutdown()
