"""Every way to write into a weight: a kept cast is never served after it."""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp.engine.casts import cache as castcache
from mpamp.engine.casts.cache import is_weight
from mpamp.engine.casts.entries import Entries
from mpamp.engine.casts.writes import silent_ops
from mpamp.testing import WeightCastCounter

BRAIN = torch.bfloat16
Tensor, Parameter = torch.Tensor, torch.nn.Parameter
IN_BOTH_CACHES = pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
OF_BOTH_KINDS = pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])


@pytest.fixture(autouse=True)
def cache_is_left_empty() -> Iterator[None]:
    yield
    mpamp.clear_cache()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(0, 1, 8).reshape(2, 4)


def layer(requires_grad: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).requires_grad_(requires_grad)


def uncached(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), mpamp.autocast("cpu", dtype=BRAIN, cache_enabled=False):
        return module(x)


def assert_seen(module: nn.Module, x: Tensor, write: Callable[[], Any], persistent: bool) -> None:
    """Check that a region uses what ``write`` leaves, inside it or before the next one."""

    def region() -> mpamp.Region:
        return mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=persistent)

    with region():
        before = module(x).detach().clone()
        if not persistent:
            with mpamp.autocast("cpu", enabled=False):
                write()
            found = module(x)
    if persistent:
        write()
        with region():
            found = module(x)
    assert torch.equal(found, uncached(module, x))
    assert not torch.equal(found, before)


# -- Optimizers ----------------------------------------------------------------------------------------


OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}
MODES = ("foreach", "fused", "differentiable", "plain")


def _takes(cls: Any, mode: str) -> bool:
    return mode == "plain" or mode in inspect.signature(cls.__init__).parameters


def _step(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        return torch.zeros(())

    with torch.no_grad():
        optimizer.step(closure)


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, cls in OPTIMIZERS.items() for mode in MODES if _takes(cls, mode)]
)
def test_every_optimizer_is_seen(x: Tensor, name: str, mode: str, requires_grad: bool, persistent: bool) -> None:
    if mode == "differentiable" and requires_grad:
        requires_grad = False  # torch refuses to write into leaves there
    module = layer(requires_grad)
    weights = [module.weight] if name == "Muon" else list(module.parameters())
    options: dict[str, Any] = {"foreach": False} if mode == "plain" and _takes(OPTIMIZERS[name], "foreach") else {}
    optimizer = OPTIMIZERS[name](weights, lr=0.5, **options, **({} if mode == "plain" else {mode: True}))
    for p in weights:
        p.grad = torch.ones_like(p)
    assert_seen(module, x, lambda: _step(optimizer), persistent)


class WritesData(torch.optim.Optimizer):
    """Writes as optimizers of old do, past the version counter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1)


@IN_BOTH_CACHES
@OF_BOTH_KINDS
def test_an_optimizer_that_writes_data_is_seen(x: Tensor, requires_grad: bool, persistent: bool) -> None:
    module = layer(requires_grad)
    assert_seen(module, x, WritesData(module.parameters()).step, persistent)


def _fused_call(op: torch._ops.OpOverload, weights: list[Tensor]) -> None:
    """Call a fused optimizer's op as a program does that has no optimizer."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    numbers = {"lr": 0.5, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "lr_decay": 0.0}
    for argument in op._schema.arguments:
        kind, name = str(argument.type), argument.name
        value: Any
        if name == "self":
            value = weights
        elif name == "state_steps":
            value = [torch.ones(()) for _ in weights]
        elif name in ("max_exp_avg_sqs", "momentum_buffer_list"):
            value = []
        elif kind == "List[Tensor]":
            value = [torch.ones_like(w) for w in weights]
        elif kind == "Tensor":
            value = torch.tensor(0.5)
        elif kind == "bool":
            value = False
        elif kind == "float":
            value = numbers.get(name, 0.0)
        else:
            continue
        if argument.kwarg_only:
            kwargs[name] = value
        else:
            args.append(value)
    op(*args, **kwargs)


def test_torch_has_fused_optimizers() -> None:
    names = {op._schema.name for op in FUSED}
    assert names >= {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}


def _fused() -> list[torch._ops.OpOverload]:
    found = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_fused_") and "." not in n]
    ops = [getattr(torch.ops.aten, n.removeprefix("aten::")) for n in sorted(found) if n.endswith("_")]
    return [getattr(op, overload) for op in ops for overload in op.overloads() if "out" not in overload]


FUSED = _fused()


def test_each_has_one_kernel_of_mpamp_s() -> None:
    with mpamp.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert not set(silent_ops()) & set(FUSED)  # once watched, they are silent no more


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", FUSED, ids=str)
def test_a_fused_op_called_by_itself_is_seen(
    x: Tensor, op: torch._ops.OpOverload, mode: Any, requires_grad: bool, persistent: bool
) -> None:
    module = layer(requires_grad)

    def write() -> None:
        with mode():
            _fused_call(op, list(module.parameters()))

    assert_seen(module, x, write, persistent)


def _functional(name: str, mode: str, weights: list[Tensor]) -> None:
    function = getattr(importlib.import_module(f"torch.optim.{name}"), name)
    known: dict[str, Any] = {
        "params": weights,
        "state_steps": [torch.ones(()) for _ in weights],
        "max_exp_avg_sqs": [], "momentum_buffer_list": [None for _ in weights],
        "has_complex": False, "maximize": False, "amsgrad": False, "nesterov": False,
        "lr": 0.5, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0,
        "lr_decay": 0.0, "foreach": mode == "foreach", "fused": mode == "fused",
        "has_sparse_grad": False, "grad_scale": None, "found_inf": None,
    }  # fmt: skip
    wanted = inspect.signature(function).parameters
    given = {k: v for k, v in known.items() if k in wanted}
    given |= {
        k: [torch.ones_like(w) for w in weights]
        for k in wanted
        if k.endswith(("grads", "avgs", "sqs", "sums", "p_list"))
    }
    given["max_exp_avg_sqs"] = [] if "max_exp_avg_sqs" in wanted else given.pop("max_exp_avg_sqs", None)
    with torch.no_grad():
        function(**{k: v for k, v in given.items() if k in wanted})


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("mode", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_functional_optimizers_are_seen(x: Tensor, name: str, mode: str, requires_grad: bool, persistent: bool) -> None:
    module = layer(requires_grad)
    assert_seen(module, x, lambda: _functional(name, mode, list(module.parameters())), persistent)


@pytest.mark.slow
@IN_BOTH_CACHES
@pytest.mark.parametrize("mode", ["foreach", "fused"])
def test_a_compiled_step_is_seen(x: Tensor, mode: str, persistent: bool) -> None:
    module = layer()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, **{mode: True})
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    assert_seen(module, x, torch.compile(optimizer.step, backend="aot_eager"), persistent)


@pytest.mark.python_engine
def test_a_step_touches_what_hangs_on_its_own_weights(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [layer(False) for _ in range(50)]
    stepped = layer()
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.5, fused=True)
    touched: list[int] = []
    forget = Entries.forget
    with mpamp.autocast("cpu", dtype=BRAIN):
        for module in [*kept, stepped]:
            module(x).sum()
        stepped(x).sum().backward()
        entries = mpamp.cache_info().entries
        monkeypatch.setattr(Entries, "forget", lambda self, n: (touched.append(n), forget(self, n)))
        for _ in range(3):
            optimizer.step()
        assert set(touched) == {p.untyped_storage()._cdata for p in stepped.parameters()}
        assert len(touched) == 3 * 2 * 2  # steps, weights, and that both the op and the optimizer tell
        assert (entries, mpamp.cache_info().entries) == (102, 100)


def test_a_step_of_one_optimizer_keeps_what_the_other_s_weights_have(x: Tensor) -> None:
    first, second = layer(), layer()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.5)
    with WeightCastCounter(second) as casts, mpamp.autocast("cpu", dtype=BRAIN):
        for _ in range(3):
            second(first(x)).sum().backward()
            optimizer.step()
    assert casts.count == 2


# -- Modules -------------------------------------------------------------------------------------------


def _assign(module: nn.Module) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)


def _load(module: nn.Module) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})


def _vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector + 1, module.parameters())


def _there_and_back(module: nn.Module) -> None:
    module.double()
    for p in module.parameters():
        p.data.mul_(2)
    module.float()


def _foreach(name: str, *args: Any) -> Callable[[nn.Module], Any]:
    def write(module: nn.Module) -> None:
        weights = list(module.parameters())
        like = [torch.ones_like(w) for w in weights]
        with torch.no_grad():
            getattr(torch, name)(weights, *(like if a is list else a for a in args))

    return write


def _each(write: Callable[[Tensor], Any], mode: Any = torch.no_grad) -> Callable[[nn.Module], Any]:
    def write_all(module: nn.Module) -> None:
        with mode():
            for p in module.parameters():
                write(p)

    return write_all


def _hidden(p: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(p):
        p.mul_(2)


def _freed_and_hidden(p: Tensor) -> None:
    storage, size = p.untyped_storage(), p.untyped_storage().nbytes()
    with torch.autograd._unsafe_preserve_version_counter(p):
        storage.resize_(0)
        storage.resize_(size)
        p.fill_(0.5)


MODULE_WRITES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": _load,
    "load_state_dict by assignment": _assign,
    "reset_parameters": lambda m: (torch.manual_seed(7), m.reset_parameters()),
    "vector_to_parameters": _vector,
    "double and back": _there_and_back,
    "init": lambda m: [nn.init.uniform_(p, 1, 2) for p in m.parameters()],
    "foreach add": _foreach("_foreach_add_", 1.0),
    "foreach lerp": _foreach("_foreach_lerp_", list, 0.5),
    "foreach copy": _foreach("_foreach_copy_", list),
    "foreach zero": _foreach("_foreach_zero_"),
    "in inference mode": _each(lambda p: p.add_(1), torch.inference_mode),
    "by a view": _each(lambda p: p.view(-1).add_(1)),
    "by a part": _each(lambda p: p[0].add_(1)),
    "by as_strided": _each(lambda p: p.as_strided((p.numel(),), (1,)).add_(1)),
    "by detach": _each(lambda p: p.detach().add_(1)),
    "by out=": _each(lambda p: torch.add(p, 1, out=p.detach())),
    "by set_": _each(lambda p: p.set_(torch.ones_like(p))),
    "by other data": _each(lambda p: setattr(p, "data", torch.ones_like(p))),
    "by data made in inference mode": _each(lambda p: setattr(p, "data", torch.ones_like(p)), torch.inference_mode),
    "renorm_": _each(lambda p: p.view(-1, 1).renorm_(2, 0, 0.01)),
    "clamp_": _each(lambda p: p.clamp_(-0.01, 0.01)),
    "index_copy_": _each(lambda p: p.index_copy_(0, torch.tensor([0]), torch.ones_like(p[:1]))),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.weight, Parameter(torch.ones(4, 4))),
    "a new parameter": lambda m: setattr(m, "weight", Parameter(torch.ones(4, 4))),
    "behind the counter": _each(_hidden),
    "freed, and behind the counter": _each(_freed_and_hidden),
    "share_memory": lambda m: (m.share_memory(), _load(m)),
    "pruning": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m).parametrizations.weight.original0.data.mul_(2),
}


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("write", MODULE_WRITES)
def test_a_write_into_a_module_is_seen(x: Tensor, write: str, requires_grad: bool, persistent: bool) -> None:
    module = layer(requires_grad)
    assert_seen(module, x, lambda: MODULE_WRITES[write](module), persistent)


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("change", ["to", "load_state_dict", "to_empty"])
def test_modules_convert_by_swapping_after_a_persistent_region(x: Tensor, change: str, swap: bool) -> None:
    module = layer(False)
    changes: dict[str, Callable[[], Any]] = {
        "to": lambda: module.to(torch.float64),
        "load_state_dict": lambda: _load(module),
        "to_empty": lambda: module.to_empty(device="cpu"),
    }
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        with torch.no_grad(), mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=True):
            module(x)
        changes[change]()
        if change == "load_state_dict":
            with torch.no_grad(), mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=True):
                assert torch.equal(module(x), uncached(module, x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@IN_BOTH_CACHES
@pytest.mark.parametrize(
    "average", [None, get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()], ids=["mean", "ema", "swa"]
)
def test_an_averaged_model_is_seen(x: Tensor, average: Any, persistent: bool) -> None:
    module = layer()
    averaged = AveragedModel(module, multi_avg_fn=average)

    def update() -> None:
        with torch.no_grad():
            module.weight.add_(1)
        averaged.update_parameters(module)

    averaged.update_parameters(module)
    assert_seen(averaged, x, update, persistent)


@IN_BOTH_CACHES
def test_a_weight_averaged_into_its_model_is_seen(x: Tensor, persistent: bool) -> None:
    module, other = layer(), layer()
    with torch.no_grad():
        other.weight.add_(1)

    def write() -> None:
        with torch.no_grad():
            for p, q in zip(module.parameters(), other.parameters(), strict=True):
                p.lerp_(q, 0.5)

    assert_seen(module, x, write, persistent)


def test_copies_have_casts_of_their_own(x: Tensor) -> None:
    module = layer(False)
    with mpamp.autocast("cpu", dtype=BRAIN):
        module(x)
        copied = copy.deepcopy(module)
        with torch.no_grad():
            copied.weight.add_(1)
        assert torch.equal(copied(x), uncached(copied, x))
        assert torch.equal(module(x), uncached(module, x))


# -- Weights that are a part of something larger -------------------------------------------------------


FLAT_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda flat: flat.add_(1),
    "step": lambda flat: torch.optim.SGD([flat], lr=0.5).step(),
    "fused step": lambda flat: torch.optim.SGD([flat], lr=0.5, fused=True).step(),
    "data": lambda flat: flat.data.add_(1),
}


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("write", FLAT_WRITES)
@pytest.mark.parametrize("alias", ["data", "detach", "vector_to_parameters"])
def test_a_write_into_a_flat_parameter_is_seen(
    x: Tensor, alias: str, write: str, requires_grad: bool, persistent: bool
) -> None:
    module = layer(requires_grad)
    flat = Parameter(nn.utils.parameters_to_vector(module.parameters()).detach().clone())
    flat.grad = torch.ones_like(flat)
    if alias == "vector_to_parameters":
        nn.utils.vector_to_parameters(flat.detach(), module.parameters())
    else:
        source = flat.data if alias == "data" else flat.detach()
        module.weight = Parameter(source[:16].view(4, 4), requires_grad=requires_grad)
        module.bias = Parameter(source[16:], requires_grad=requires_grad)

    def act() -> None:
        with torch.no_grad():
            FLAT_WRITES[write](flat)

    assert_seen(module, x, act, persistent)


@IN_BOTH_CACHES
@OF_BOTH_KINDS
def test_a_step_of_an_alias_is_seen(x: Tensor, requires_grad: bool, persistent: bool) -> None:
    module = layer(requires_grad)
    master = Parameter(module.weight.data)  # all of the weight's memory, and a version counter of its own
    master.grad = torch.ones_like(master)
    assert is_weight(module.weight)
    assert_seen(module, x, torch.optim.SGD([master], lr=0.5, fused=True).step, persistent)


def test_data_turned_over_in_place_is_seen() -> None:
    weight, x = Parameter(torch.ones(4, 1)), torch.ones(1, 4)
    with mpamp.autocast("cpu", dtype=BRAIN):
        assert torch.mm(x, weight).shape == (1, 1)
        weight.data = weight.data.t()  # strides, address, size and version are what they were
        assert torch.mm(weight, x.t()).shape == (1, 1)


# -- FSDP ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rank'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _step_sharded(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    module.zero_grad()


SHARDED_WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "mul_": lambda m: [p.mul_(0.5) for p in m.parameters()],
    "load_state_dict": lambda m: m.load_state_dict({k: v * 3 for k, v in m.state_dict().items()}),
    "step": _step_sharded,
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("write", SHARDED_WRITES)
def test_a_write_into_shards_is_seen(
    x: Tensor, write: str, reshard: bool, requires_grad: bool, persistent: bool
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(requires_grad)
    mesh = init_device_mesh("cpu", (1,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    with torch.no_grad():
        module(x)

    def act() -> None:
        for part in (module, *module):
            part.reshard()
        with torch.no_grad():
            SHARDED_WRITES[write](module)

    with torch.no_grad():
        assert_seen(module, x, act, persistent)
    assert mpamp.cache_info().entries == 0  # nothing is kept of memory that comes and goes


# -- Writes while the cast is made ---------------------------------------------------------------------


class Meanwhile(TorchDispatchMode):
    """Stands for another thread that acts between the cast and what is kept of it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].shape[0] == 4:
            act, self.act = self.act, lambda: None
            act()
        return result


def _versioned(weight: Tensor) -> None:
    with torch.no_grad():
        weight.fill_(7)
    torch.autograd.graph.increment_version(weight)  # which it doesn't do below autograd, where modes are


def _silent(weight: Tensor) -> None:
    weight.data.fill_(7)


MEANWHILE: dict[str, Callable[[Tensor], Any]] = {
    "a write": _versioned,
    "other data": lambda w: setattr(w, "data", torch.full((4, 4), 7.0)),
    "a write and clear_cache": lambda w: (_silent(w), mpamp.clear_cache()),
    "a fused step": lambda w: (_silent(w), castcache.forget([w])),
}


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("what", MEANWHILE)
def test_a_write_while_the_cast_is_made_is_seen(x: Tensor, what: str, requires_grad: bool, persistent: bool) -> None:
    weight = Parameter(torch.zeros(4, 4), requires_grad=requires_grad)
    with mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=persistent), Meanwhile(lambda: MEANWHILE[what](weight)):
        functional.linear(x, weight)
        assert functional.linear(x, weight)[0, 0] == 7 * x[0].to(BRAIN).sum()


def test_what_a_dispatch_mode_made_is_not_used_outside_of_it(x: Tensor) -> None:
    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.zeros_like(func(*args, **(kwargs or {})))

    module = layer(False)
    with mpamp.autocast("cpu", dtype=BRAIN):
        with Zeros():
            module(x)
        assert torch.equal(module(x), uncached(module, x))


NINE: dict[str, Callable[[Tensor, float], Any]] = {
    "fill_": lambda w, value: w.fill_(value),
    "data": lambda w, value: setattr(w, "data", torch.full((4, 4), value)),
    "data and clear_cache": lambda w, value: (w.data.fill_(value), mpamp.clear_cache()),
    "fused": lambda w, value: _fused_call(torch.ops.aten._fused_sgd_.default, [w]),
}


@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("write", NINE)
def test_eight_threads_use_a_weight_that_a_ninth_changes(write: str, requires_grad: bool, persistent: bool) -> None:
    weight, x = Parameter(torch.zeros(4, 4), requires_grad=requires_grad), torch.eye(4)
    rounds, stale, errors = 40, [0], []
    barrier = threading.Barrier(9, timeout=60)

    def use() -> None:
        try:
            with mpamp.autocast("cpu", dtype=BRAIN, persistent_cache=persistent):
                for _ in range(rounds):
                    barrier.wait()
                    for _ in range(5):
                        functional.linear(x, weight)  # while it is being written
                    barrier.wait()
                    stale[0] += not torch.equal(functional.linear(x, weight), weight.detach().t().to(BRAIN))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        for number in range(rounds):
            barrier.wait()
            for part in range(5):
                NINE[write](weight, 5.0 * number + part + 1)
            barrier.wait()
    for thread in threads:
        thread.join()
    assert (stale[0], errors) == (0, [])
