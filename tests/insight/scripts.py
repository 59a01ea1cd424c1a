"""Small scripts that train or run a model in ways that tools have to stay out of; each returns what it came to."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mpamp

BRAIN = torch.bfloat16
Script = Callable[[], Any]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = functional.gelu) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(8, 16), nn.Linear(16, 4), between

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.b(self.between(self.a(x), *more))


def region() -> mpamp.Region:
    return mpamp.autocast("cpu", BRAIN)


def train(model: nn.Module, *more: Any, steps: int = 2, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Train a few steps; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with region():
            y = (call or model)(torch.randn(4, 8), *[each(step) if callable(each) else each for each in more])
            loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# -- Compiled code ---------------------------------------------------------------------------------------


def compiled_model(backend: str) -> Script:
    return lambda: train(torch.compile(Net(), backend=backend))


def compiled_part(backend: str) -> Script:
    def run() -> Any:
        model = Net()
        model.a = torch.compile(model.a, backend=backend)
        model.b.compile(backend=backend)
        return train(model)

    return run


def compiled_function(backend: str) -> Script:
    @torch.compile(backend=backend)
    def scaled(x: Tensor, by: float) -> Tensor:
        return functional.gelu(x) * by

    return lambda: train(Net(scaled), lambda step: 1.0 + step / 10, steps=4)


for _backend in ("eager", "aot_eager"):
    SCRIPTS[f"compiled model, {_backend}"] = compiled_model(_backend)
    SCRIPTS[f"compiled part, {_backend}"] = compiled_part(_backend)
    SCRIPTS[f"compiled function, {_backend}"] = compiled_function(_backend)


@script
def compiled_with_breaks() -> Any:
    def between(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return functional.gelu(x)

    return train(torch.compile(Net(between), backend="aot_eager"))


@script
def compiled_step_around_a_model() -> Any:
    model = Net()

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return y * 2

    return train(model, call=step)


@script
def compiled_that_may_not_be_compiled_again() -> Any:
    model = torch.compile(Net(), backend="aot_eager")
    with torch.no_grad(), region():
        model(torch.randn(4, 8))
        with torch.compiler.set_stance("fail_on_recompile"):
            return model(torch.randn(4, 8))


@script
def compiled_and_reset() -> Any:
    model = torch.compile(Net(), backend="eager")
    first = train(model)
    torch._dynamo.reset()
    return first, train(model)


@script
def compiled_in_full() -> Any:
    return train(torch.compile(Net(), backend="aot_eager", fullgraph=True, dynamic=True))


@script
def left_out_of_compiled_code() -> Any:
    return train(torch.compile(Net(torch.compiler.disable(functional.gelu)), backend="aot_eager"))


# -- Scripts, traces, transforms -------------------------------------------------------------------------


@script
def scripted() -> Any:
    return train(torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))))


@script
def traced() -> Any:
    return train(torch.jit.trace(Net(), torch.randn(4, 8), check_trace=False))


@script
def traced_inside() -> Any:
    model = Net()
    return torch.jit.trace(model, torch.randn(4, 8))(torch.ones(4, 8)), train(model)


@script
def exported() -> Any:
    model = Net()
    train(model)
    return torch.export.export(model, (torch.randn(4, 8),)).module()(torch.ones(4, 8))


@script
def vmapped() -> Any:
    return train(Net(torch.func.vmap(lambda row: functional.gelu(row) * row.sum())))


@script
def per_sample_gradients() -> Any:
    model = Net()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).float().square().mean()

    with region():
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(params, torch.randn(4, 8)), train(model)


@script
def hessian() -> Any:
    model = nn.Linear(8, 1)
    train(model)
    x = torch.randn(8)
    return torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x), torch.func.hessian(
        lambda x: model(x).square().sum()
    )(x)


@script
def double_backward() -> Any:
    model, found = Net(torch.tanh), []
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        with region():
            y = model(x).float().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        found.append(model.a.weight.grad.clone())
    return found


@script
def forward_mode() -> Any:
    model = Net()
    with torch.autograd.forward_ad.dual_level(), region():
        dual = torch.autograd.forward_ad.make_dual(torch.randn(4, 8), torch.ones(4, 8))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent, train(model)


# -- Checkpoints -----------------------------------------------------------------------------------------


@script
def reentrant_checkpoints() -> Any:
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def call(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return x

    return train(model, call=call)


@script
def reentrant_checkpoints_of_a_whole_model() -> Any:
    model = Net()

    def call(x: Tensor) -> Tensor:
        x.requires_grad_()
        return checkpoint(model, x, use_reentrant=True) + checkpoint(model, x * 2, use_reentrant=True)

    return train(model, call=call)


@script
def reentrant_checkpoints_in_one_another() -> Any:
    inner = Net(lambda x: checkpoint(functional.gelu, x, use_reentrant=True))
    return train(inner, call=lambda x: checkpoint(inner, x.requires_grad_(), use_reentrant=True))


@script
def checkpoints() -> Any:
    return train(Net(lambda x: checkpoint(lambda x: functional.dropout(functional.gelu(x)), x, use_reentrant=False)))


@script
def saved_on_the_host() -> Any:
    model = Net()

    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    return train(model, call=call)


# -- Threads, replicas, copies ---------------------------------------------------------------------------


@script
def threads() -> Any:
    model, found = Net(), {}
    inputs = torch.randn(3, 4, 8)

    def work(number: int) -> None:
        with region():
            found[number] = model(inputs[number])
            grads = torch.autograd.grad(found[number].float().sum(), list(model.parameters()))
        found[number] = (found[number].detach(), grads)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    train(model)
    for worker in workers:
        worker.join()
    return [found[i][1][0].shape for i in range(3)]


@script
def data_parallel() -> Any:
    return train(nn.DataParallel(Net()))


@script
def copies() -> Any:
    model, found = Net(), []

    def call(x: Tensor) -> Tensor:
        y = model(x)
        found.append(copy.deepcopy(model).a.weight)
        found.append(pickle.loads(pickle.dumps(model.a)).bias)
        torch.save(model.b, io.BytesIO())
        return y

    return train(model, call=call), found


@script
def copies_in_forward() -> Any:
    class Teacher(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                teacher = copy.deepcopy(self.a)(x)
            return self.b(self.a(x) + teacher)

    return train(Teacher())


# -- What code does with calls ---------------------------------------------------------------------------


@script
def hooks() -> Any:
    model, seen = Net(), []
    model.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.b.register_forward_hook(lambda module, args, y: y + 1)
    model.b.register_full_backward_hook(lambda module, given, grads: seen.append(grads[0].sum()))
    model.a.weight.register_hook(lambda grad: grad * 2)
    model.a.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    return train(model), seen


@script
def errors_in_a_step() -> Any:
    def between(x: Tensor, step: int) -> Tensor:
        return x @ x if step == 1 else functional.gelu(x)

    model, found = Net(between), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        try:
            with region():
                loss = model(torch.randn(4, 8), step).float().sum()
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            found.append(str(error))
    return found, [p.detach() for p in model.parameters()]


@script
def errors_in_a_backward_pass() -> Any:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise LookupError("as planned")

    model = Net(Fails.apply)
    with region():
        loss = model(torch.randn(4, 8)).float().sum()
    try:
        loss.backward()
    except LookupError as error:
        return str(error), train(Net())


@script
def generators() -> Any:
    def parts(x: Tensor) -> Iterator[Tensor]:
        for part in x.split(8, -1):
            yield functional.gelu(part)

    return train(Net(lambda x: torch.cat(list(parts(x)), -1)))


@script
def custom_functions() -> Any:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * (x.sigmoid() * (1 + x * (1 - x.sigmoid())))

    return train(Net(Swish.apply))


@script
def in_place() -> Any:
    def between(x: Tensor) -> Tensor:
        y = torch.empty_like(x).copy_(x)
        y[:, 0].mul_(2)
        y[:, 1:3] = torch.relu_(y[:, 1:3].clone())
        return y.add_(1)

    return train(Net(between))


@script
def several_models() -> Any:
    first, second = Net(), Net()
    return train(first), train(second), train(nn.Sequential(first.a, second.b))


@script
def parametrized() -> Any:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.a)
    nn.utils.parametrizations.spectral_norm(model.b)
    return train(model)


@script
def sparse_and_complex() -> Any:
    def between(x: Tensor) -> Tensor:
        square = torch.eye(16).to_sparse()
        return (torch.sparse.mm(square, x.float().T).T + torch.fft.fft(x.float()).real).to(x.dtype)

    return train(Net(between))


@script
def nested() -> Any:
    def between(x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        return torch.cat([functional.gelu(row) for row in rows.unbind()])

    return train(Net(between))


@script
def inference() -> Any:
    model = Net()
    train(model)
    with torch.inference_mode(), region():
        return model(torch.ones(4, 8)) * 2


@script
def gathered_gradients() -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            with region():
                loss = model(torch.randn(4, 8)).float().square().mean()
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@script
def closures() -> Any:
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with region():
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure), [p.detach() for p in model.parameters()]


# -- Kinds of tensors, ops and wrappers ------------------------------------------------------------------


@script
def compiled_by_inductor() -> Any:
    return train(torch.compile(Net()))


@script
def recurrent() -> Any:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, 2)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x[:, None].expand(4, 3, 8), [4, 3, 2])
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]

    return train(Rows())


@script
def sparse_gradients() -> Any:
    table = nn.EmbeddingBag(10, 8, mode="sum", sparse=True)
    return train(nn.Sequential(table, nn.Linear(8, 4)), call=lambda x: table(torch.arange(8).reshape(4, 2)))


@script
def attention() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    train(layer, call=lambda x: layer(x[None]))
    layer.eval()
    with torch.no_grad(), region():
        return layer(torch.ones(1, 4, 8))


@script
def custom_ops() -> Any:
    name = "insight_scripts::twice"
    if not hasattr(torch.ops.insight_scripts, "twice"):

        @torch.library.custom_op(name, mutates_args=())
        def twice(x: Tensor) -> Tensor:
            return x * 2

        twice.register_autograd(lambda ctx, grad: grad * 2)
        twice.register_fake(torch.empty_like)
    return train(Net(torch.ops.insight_scripts.twice))


@script
def higher_order_ops() -> Any:
    def between(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    model = Net(between)
    with torch.no_grad(), region():
        return model(torch.ones(4, 8))


@script
def modes() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        return train(Net()), counter.get_total_flops()


@script
def subclasses() -> Any:
    class Marked(Tensor):
        pass

    model = Net()
    made = [Marked(2, 3).shape, Marked([1.0, 2.0]) * 2, nn.Parameter(Marked([1.0])), torch.ones(2).as_subclass(Marked)]

    def call(x: Tensor) -> Tensor:
        return model(x.as_subclass(Marked)).as_subclass(Tensor) + Marked([1.0]).as_subclass(Tensor)

    return [str(type(one)) for one in made], train(model, call=call)


@script
def numbers_and_views() -> Any:
    def between(x: Tensor) -> Tensor:
        y = 2.5 * x - torch.tensor(3) + torch.where(x > 0, 1.0, x) ** 2
        return y.view(-1)[::2].repeat_interleave(2).view_as(x) + torch.outer(x[:, 0], x[0]) / 1e3

    return train(Net(between))


@script
def anomalies() -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        return train(Net())


@script
def profiled() -> Any:
    with torch.profiler.profile(acc_events=True) as found:
        result = train(Net())
    return result, sum(event.key == "aten::linear" for event in found.events())


@script
def distributed() -> Any:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        found = [p.full_tensor() for p in train(fully_shard(Net(), mesh=mesh))]
        return found, train(nn.parallel.DistributedDataParallel(Net()))
    finally:
        dist.destroy_process_group()
