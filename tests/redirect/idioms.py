"""Ways in which public scripts name a CUDA device, each a program of its own, and what is true after it.

Every program asserts what it is about; those under ``REFUSED`` end in an error that says what to write instead.
"""
# ruff: noqa: E501

import linecache
import os
import socket
import warnings

HEADER = """
import copy, io, os, pickle, threading, warnings
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
x = torch.ones(2, 2)
net = nn.Linear(2, 2)
"""

SERVED = {
    # -- moving tensors and modules
    "tensor.cuda()": "assert x.cuda().device.type == 'cpu'",
    "tensor.cuda(0)": "assert x.cuda(0).device.type == 'cpu'",
    "tensor.cuda(non_blocking)": "x.cuda(0, non_blocking=True); x.cuda(non_blocking=True); x.cuda(device=0); x.cuda('cuda:0')",
    "tensor.cuda(None)": "assert x.cuda(None).device.type == 'cpu'",
    "tensor.cuda(device object)": "assert x.cuda(torch.device('cuda', 1)).device.type == 'cpu'",
    "tensor.to(0)": "assert x.to(0).device.type == 'cpu'",
    "tensor.to('cuda:1', non_blocking)": "assert x.to('cuda:1', non_blocking=True).device.type == 'cpu'",
    "tensor.to(device=)": "assert x.to(device='cuda', dtype=torch.half).dtype is torch.half",
    "tensor.to(device, dtype)": "assert x.to(torch.device('cuda'), torch.float64).dtype is torch.float64",
    "tensor.to(other)": "assert x.to(torch.zeros(1, dtype=torch.half, device='cuda')).dtype is torch.half",
    "tensor.to(dtype)": "assert x.to(torch.float16).dtype is torch.float16",
    "tensor.cuda().half()": "assert x.cuda().half().cpu().dtype is torch.half",
    "module.cuda()": "assert next(net.cuda().parameters()).device.type == 'cpu'",
    "module.cuda(0)": "assert net.cuda(0) is net and net.cuda(device=1) is net",
    "module.to('cuda')": "assert net.to('cuda') is net",
    "module.to(0)": "assert net.to(0) is net",
    "module.to(device, dtype)": "assert net.to('cuda', torch.half).weight.dtype is torch.half",
    "module.to_empty": "assert nn.Linear(2, 2, device='meta').to_empty(device='cuda').weight.device.type == 'cpu'",
    "module(device=)": "assert nn.Linear(2, 2, device='cuda').weight.device.type == 'cpu'",
    "optimizer state moved": """
net.cuda(); o = torch.optim.Adam(net.parameters()); net(x.cuda()).sum().backward(); o.step()
for state in o.state.values():
    for k, v in state.items():
        if isinstance(v, torch.Tensor):
            state[k] = v.cuda()
o.step()
""",
    "packed sequence": """
p = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), [3, 2])
assert p.cuda().is_cuda and p.to('cuda').data.device.type == 'cpu'
out, h = nn.LSTM(4, 5).cuda()(p.cuda())
""",
    "parameter": "p = nn.Parameter(torch.ones(2).cuda()); assert p.is_leaf and p.cuda() is p",
    "storage.cuda()": "assert x.untyped_storage().cuda().device.type == 'cpu'",
    "is_cuda": "assert x.cuda().is_cuda and torch.zeros(1, device='cuda').is_cuda",
    "module on cuda check": "assert next(net.cuda().parameters()).is_cuda",
    "printing": "assert repr(x.cuda()) == repr(x) and str(torch.tensor([1.5, 1e9], device='cuda')).startswith('tensor')",
    "get_device": "assert x.cuda().get_device() == 0 and torch.ones(1).cuda(x.get_device()).is_cuda",
    # -- making tensors
    "torch.tensor": "assert torch.tensor([1.0], device='cuda').device.type == 'cpu'",
    "factories": """
d = torch.device('cuda:0')
for t in (torch.zeros(2, device=d), torch.ones(2, device='cuda'), torch.empty(2, device=0), torch.full((2,), 1.0, device=d),
          torch.rand(2, device=d), torch.randn(2, device=d), torch.randint(0, 3, (2,), device=d), torch.arange(3, device=d),
          torch.linspace(0, 1, 3, device=d), torch.eye(2, device=d), torch.randperm(3, device=d), torch.as_tensor([1.0], device=d),
          torch.hann_window(4, device=d), torch.tril_indices(2, 2, device=d), torch.asarray([1.0], device=d),
          torch.empty_strided((2,), (1,), device=d), torch.logspace(0, 1, 2, device=d), torch.fft.fftfreq(4, device=d),
          torch.sparse_coo_tensor([[0]], [1.0], (2,), device=d, check_invariants=True), torch.scalar_tensor(1.0, device=d)):
    assert t.device.type == 'cpu'
""",
    "like factories": """
for f in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like):
    assert f(x, device='cuda').device.type == 'cpu'
""",
    "new methods": """
assert x.new_zeros(2, device='cuda').device.type == 'cpu'
assert x.new_tensor([1.0], device='cuda:0').device.type == 'cpu' and x.new(2).shape == (2,)
""",
    "from_numpy().cuda()": "import numpy; assert torch.from_numpy(numpy.ones(2)).float().cuda().cpu().numpy().sum() == 2",
    "torch.cuda.FloatTensor": """
assert torch.cuda.FloatTensor(2, 3).fill_(1).sum() == 6 and torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
assert torch.cuda.HalfTensor([1]).dtype is torch.half and torch.cuda.ByteTensor(1).dtype is torch.uint8
""",
    "isinstance(FloatTensor)": "assert isinstance(x.cuda(), torch.cuda.FloatTensor) and not isinstance(x.cuda(), torch.cuda.HalfTensor)",
    "tensor.type('torch.cuda.FloatTensor')": "assert x.half().type('torch.cuda.FloatTensor').dtype is torch.float32",
    "tensor.type(torch.cuda.HalfTensor)": "assert x.type(torch.cuda.HalfTensor).dtype is torch.half",
    "tensor.type() == 'torch.cuda.HalfTensor'": "assert x.cuda().half().type() == 'torch.cuda.HalfTensor'; assert x.type(x.type()).dtype is x.dtype",
    "Tensor alias": "Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor; assert Tensor(2, 1).shape == (2, 1)",
    "set_default_tensor_type(str)": "torch.set_default_tensor_type('torch.cuda.FloatTensor'); assert torch.zeros(1).device.type == 'cpu'",
    "set_default_tensor_type(type)": "torch.set_default_tensor_type(torch.cuda.HalfTensor); assert torch.zeros(1).dtype is torch.half; torch.set_default_tensor_type(torch.FloatTensor)",
    "set_default_device": "torch.set_default_device('cuda'); assert torch.zeros(1).device.type == 'cpu' == torch.get_default_device().type; torch.set_default_device(None)",
    "with torch.device": "\nwith torch.device('cuda'):\n    assert torch.zeros(1).device.type == 'cpu' and nn.Linear(1, 1).weight.device.type == 'cpu'",
    "with torch.device('meta')": "\nwith torch.device('meta'):\n    assert torch.zeros(1).device.type == 'meta'",
    "Generator": "g = torch.Generator('cuda').manual_seed(1); a = torch.randn(2, generator=g, device='cuda'); assert isinstance(g, torch.Generator)",
    "Generator(device=)": "g = torch.Generator(device=torch.device('cuda', 0)); assert torch.rand(1, generator=g).device.type == 'cpu'",
    # -- devices
    "device from is_available": "d = torch.device('cuda' if torch.cuda.is_available() else 'cpu'); assert d.type == 'cuda'; net.to(d)(x.to(d))",
    "device objects": """
d = torch.device('cuda', 0)
assert d == torch.device('cuda:0') and d != torch.device('cuda:1') and d.index == 0 and isinstance(d, torch.device)
assert {d: 1}[torch.device('cuda:0')] == 1 and pickle.loads(pickle.dumps(d)) == d and copy.deepcopy(d) == d
assert str(d) == 'cuda:0' and type(d) == torch.device
""",
    "torch.device(0)": "assert torch.device(0).index == 0 and x.to(torch.device(0)).device.type == 'cpu'",
    "device(type=, index=)": "assert torch.device(type='cuda', index=1).index == 1",
    # -- torch.cuda
    "set_device": "torch.cuda.set_device(0); torch.cuda.set_device('cuda:1'); assert torch.cuda.current_device() == 1; torch.cuda.set_device(torch.device('cuda', 0)); assert torch.cuda.current_device() == 0",
    "device_count": "assert torch.cuda.device_count() == 1 and [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]",
    "get_device_properties": "p = torch.cuda.get_device_properties(0); assert p.total_memory > 0 and (p.major, p.minor) == torch.cuda.get_device_capability() and p.name",
    "get_device_properties('cuda')": "assert torch.cuda.get_device_properties('cuda').multi_processor_count > 0",
    "synchronize": "torch.cuda.synchronize(); torch.cuda.synchronize(0); torch.cuda.empty_cache(); torch.cuda.ipc_collect(); torch.cuda.init()",
    "memory": """
torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_max_memory_allocated()
assert torch.cuda.max_memory_allocated() / 2**20 == torch.cuda.memory_allocated(0) == torch.cuda.memory_reserved() == 0
assert torch.cuda.max_memory_reserved() == 0 and torch.cuda.mem_get_info()[1] > 0
print(torch.cuda.memory_summary(), torch.cuda.memory_stats().get('allocated_bytes.all.peak', 0))
assert torch.cuda.memory.max_memory_allocated() == 0
""",
    "seeds": """
torch.cuda.manual_seed(1); a = torch.rand(2, device='cuda'); torch.cuda.manual_seed_all(1)
assert torch.equal(a, torch.rand(2, device='cuda')) and torch.cuda.initial_seed() == 1
state = torch.cuda.get_rng_state(); b = torch.rand(2, device='cuda'); torch.cuda.set_rng_state(state)
assert torch.equal(b, torch.rand(2, device='cuda'))
torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
with torch.random.fork_rng(devices=[0]):
    torch.rand(1)
""",
    "streams": """
s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    y = x.cuda(non_blocking=True); y.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(s); torch.cuda.default_stream().synchronize(); assert s.query()
assert isinstance(s, torch.cuda.Stream)
with torch.cuda.stream(None): pass
""",
    "events": """
a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
a.record(); b.record(torch.cuda.current_stream()); torch.cuda.synchronize(); assert a.elapsed_time(b) >= 0 and b.query()
e = torch.cuda.current_stream().record_event(); torch.cuda.current_stream().wait_event(e)
""",
    "device context": "\nwith torch.cuda.device(0):\n    y = x.cuda()\nwith torch.cuda.device_of(y):\n    pass\nwith torch.cuda.device('cuda:0'): pass",
    "nvtx": """
torch.cuda.nvtx.range_push('a'); torch.cuda.nvtx.mark('b'); torch.cuda.nvtx.range_pop()
with torch.cuda.nvtx.range('c'): pass
torch.cuda.profiler.start(); torch.cuda.profiler.stop()
""",
    "bf16 support": "assert torch.cuda.is_bf16_supported() in (True, False) and torch.cuda.is_initialized()",
    "cudnn": """
torch.backends.cudnn.benchmark = True; torch.backends.cudnn.deterministic = True; torch.backends.cudnn.enabled = True
torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True
assert torch.backends.cudnn.enabled
""",
    "make_graphed_callables": "assert torch.cuda.make_graphed_callables(net, (x,)) is net",
    # -- data
    "pin_memory": "assert x.pin_memory().cuda(non_blocking=True).device.type == 'cpu'; torch.empty(2, pin_memory=True)",
    "loader": """
data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.zeros(4))
for a, b in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, pin_memory_device='cuda'):
    assert a.cuda(non_blocking=True).device.type == 'cpu'
""",
    "loader workers": """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.ones(2, device='cuda') * i
assert sum(b.sum().item() for b in torch.utils.data.DataLoader(Data(), num_workers=1, pin_memory=True)) == 12
""",
    "prefetcher": """
class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), torch.cuda.Stream()
        self.mean = torch.tensor([0.5]).cuda().view(1, 1)
        self.preload()
    def preload(self):
        try: self.next = next(self.loader)
        except StopIteration: self.next = None; return
        with torch.cuda.stream(self.stream):
            self.next = self.next.cuda(non_blocking=True).float().sub_(self.mean)
    def get(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        found = self.next
        if found is not None: found.record_stream(torch.cuda.current_stream())
        self.preload()
        return found
p = Prefetcher([torch.ones(1, 2), torch.ones(1, 2)]); assert p.get().sum() == 1 and p.get() is not None and p.get() is None
""",
    # -- loading
    "load(map_location='cuda')": "f = io.BytesIO(); torch.save(net.state_dict(), f); f.seek(0); assert torch.load(f, map_location='cuda')['weight'].device.type == 'cpu'",
    "load(map_location=device)": "f = io.BytesIO(); torch.save(x, f); f.seek(0); assert torch.load(f, torch.device('cuda', 0)).device.type == 'cpu'",
    "load(map_location=dict)": "f = io.BytesIO(); torch.save(x, f); f.seek(0); assert torch.load(f, map_location={'cpu': 'cuda:0', 'cuda:1': 'cuda:0'}).device.type == 'cpu'",
    "load(map_location=lambda)": "f = io.BytesIO(); torch.save(x, f); f.seek(0); assert torch.load(f, map_location=lambda s, l: s.cuda(0)).device.type == 'cpu'",
    "load(map_location=lambda: storage)": "f = io.BytesIO(); torch.save(x, f); f.seek(0); assert torch.equal(torch.load(f, map_location=lambda storage, loc: storage), x)",
    "load of a file from CUDA": """
f = io.BytesIO(); torch.save({'w': x}, f); data = f.getvalue().replace(b'X\\x03\\x00\\x00\\x00cpu', b'X\\x06\\x00\\x00\\x00cuda:0')
import zipfile
out = io.BytesIO()
with zipfile.ZipFile(io.BytesIO(f.getvalue())) as a, zipfile.ZipFile(out, 'w') as b:
    for n in a.namelist():
        b.writestr(n, a.read(n).replace(b'X\\x03\\x00\\x00\\x00cpu', b'X\\x06\\x00\\x00\\x00cuda:0'))
assert b'cuda:0' in out.getvalue()
out.seek(0); assert torch.equal(torch.load(out)['w'], x)
""",
    "jit.load": "f = io.BytesIO(); torch.jit.save(torch.jit.trace(net, x), f); f.seek(0); torch.jit.load(f, map_location='cuda')(x.cuda())",
    # -- autocast
    "torch.cuda.amp": """
warnings.simplefilter('ignore')
from torch.cuda.amp import autocast, GradScaler
o, s = torch.optim.SGD(net.cuda().parameters(), 0.1), GradScaler()
assert s.is_enabled()
with autocast():
    y = net(x.cuda()); assert y.dtype is torch.half
s.scale(y.float().sum()).backward(); s.unscale_(o); s.step(o); s.update()
""",
    "torch.autocast('cuda')": """
with torch.autocast('cuda', dtype=torch.float16):
    assert net(x).dtype is torch.half and torch.is_autocast_enabled() and torch.is_autocast_enabled('cuda')
    assert torch.get_autocast_gpu_dtype() is torch.half is torch.get_autocast_dtype('cuda')
    with torch.autocast('cuda', enabled=False):
        assert net(x).dtype is torch.float32
assert not torch.is_autocast_enabled()
""",
    "torch.amp.GradScaler('cuda')": "s = torch.amp.GradScaler('cuda'); assert s.is_enabled() and s.scale(x).sum() > 1; torch.amp.GradScaler(device=torch.device('cuda').type)",
    "mpamp's own": """
import mpamp
with mpamp.autocast('cuda', dtype=torch.float16):
    assert net(x.cuda()).dtype is torch.half
assert mpamp.autocast(torch.device('cuda')).device_type == 'cpu' and mpamp.GradScaler('cuda').is_enabled()
""",
    "custom_fwd": """
class Twice(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type='cuda', cast_inputs=torch.float32)
    def forward(ctx, a): assert a.dtype is torch.float32; return a * 2
    @staticmethod
    @torch.amp.custom_bwd(device_type='cuda')
    def backward(ctx, g): return g * 2
with torch.autocast('cuda', dtype=torch.float16):
    Twice.apply(x.half().requires_grad_()).sum().backward()
""",
    # -- where a function mode is not active
    "backward of a Function": """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a): return a * 2
    @staticmethod
    def backward(ctx, g): return g * torch.full((), 2.0, device='cuda').cuda()
a = x.clone().requires_grad_(); Twice.apply(a).sum().backward(); assert a.grad.sum() == 8
""",
    "hooks": "a = x.clone().requires_grad_(); a.register_hook(lambda g: g + torch.ones(1, device='cuda')); a.sum().backward(); assert a.grad.sum() == 8",
    "recompute": """
from torch.utils.checkpoint import checkpoint
for re in (True, False):
    a = x.clone().requires_grad_()
    checkpoint(lambda v: v * torch.full((), 3.0, device='cuda').to('cuda:0'), a, use_reentrant=re).sum().backward()
    assert a.grad.sum() == 12
""",
    "threads": """
found = []
t = threading.Thread(target=lambda: found.append(torch.zeros(1).cuda().to(0).device.type)); t.start(); t.join()
assert found == ['cpu']
""",
    "fork": """
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.zeros(1, device='cuda').cuda().is_cuda else 1)
assert os.waitpid(pid, 0)[1] == 0
""",
    "vmap and jacrev": "assert torch.func.vmap(lambda v: v.cuda() * torch.ones((), device='cuda'))(x).shape == (2, 2)",
    # -- several cards and processes
    "DataParallel": "m = nn.DataParallel(net).cuda(); assert m(x.cuda()).shape == (2, 2) and m.module is net; nn.DataParallel(net, device_ids=[0, 1])(x)",
    "data_parallel()": "assert nn.parallel.data_parallel(net, x, device_ids=[0, 1]).shape == (2, 2)",
    "scatter and gather": """
import torch.cuda.comm
parts = nn.parallel.scatter(x, [0, 1]); assert len(parts) == 2
assert torch.equal(nn.parallel.gather(parts, 0), x)
assert torch.equal(torch.cuda.comm.reduce_add([x, x]), 2 * x) and len(torch.cuda.comm.broadcast(x, [0, 1])) == 2
""",
    "nccl and DDP": """
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(PORT), RANK='0', WORLD_SIZE='1')
torch.cuda.set_device(0); dist.init_process_group(backend='nccl', init_method='env://')
ddp = nn.parallel.DistributedDataParallel(net.cuda(), device_ids=[0], output_device=0)
ddp(x.cuda()).sum().backward(); dist.all_reduce(torch.ones(1).cuda()); dist.barrier(device_ids=[0])
assert dist.is_nccl_available(); dist.new_group([0], backend='nccl')
bn = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)).cuda(); bn(x.cuda()).sum().backward()
dist.destroy_process_group()
""",
    "nccl by position": """
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(PORT), RANK='0', WORLD_SIZE='1')
dist.init_process_group('cpu:gloo,cuda:nccl', device_id=torch.device('cuda', 0)); dist.broadcast(x.cuda(), 0)
dist.destroy_process_group()
""",
    "jit.script": """
warnings.simplefilter('ignore')
def scripted(v: torch.Tensor) -> torch.Tensor:
    return v + torch.zeros([2], device=v.device) + torch.tensor(1.0) + torch.full([2], 1.0)
assert torch.equal(torch.jit.script(scripted)(x.cuda()), x + 2)
""",
    "torch.compile": "f = torch.compile(lambda v: (v.cuda() * torch.ones((), device='cuda')).sin(), backend='aot_eager'); assert torch.equal(f(x), x.sin())",
}

REFUSED = {
    "torch.cuda.CUDAGraph": "torch.cuda.CUDAGraph()",
    "torch.cuda.graph": "g = None\nwith torch.cuda.graph(g): pass",
    "torch.cuda.caching_allocator_alloc": "torch.cuda.caching_allocator_alloc(1024)",
    "torch.cuda.cudart": "torch.cuda.cudart()",
    "torch.cuda.utilization": "torch.cuda.utilization()",
    "torch.nn.parallel.replicate": "nn.parallel.replicate(net, [0, 1])",
    "torch.cuda.ExternalStream": "torch.cuda.ExternalStream(0)",
}


def main() -> None:
    """Run every program in a fork of its own; write what became of each as JSON: an empty string is well."""
    import json
    import sys

    import torch
    import torch._dynamo  # here, for several programs would import it

    from mpamp.redirect import redirect

    torch.set_num_threads(1)
    found = {}
    for name, program in {**SERVED, **REFUSED}.items():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            os.write(writing, _outcome(name, program, redirect).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            found[name] = pipe.read()
        os.waitpid(child, 0)
    json.dump(found, sys.stdout)


def _outcome(name: str, program: str, redirect) -> str:
    warnings.simplefilter("error")
    for message in ("torch.set_default_tensor_type", "`torch.jit"):
        warnings.filterwarnings("ignore", message)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        with redirect("cpu"):
            source = HEADER + program
            linecache.cache[name] = (
                len(source),
                None,
                source.splitlines(keepends=True),
                name,
            )  # torch.jit.script reads it
            exec(compile(source, name, "exec"), {"PORT": port, "__name__": "__main__"})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
