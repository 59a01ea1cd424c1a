"""What is cast in a model, what goes in and out of it, its copies and its state dicts."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from mpamp.apex import amp
from mpamp.apex.casting import cast_tree
from tests.apex.training import LOW_MODEL, data, net, start, step

HALF, FP32 = torch.float16, torch.float32
Pair = collections.namedtuple("Pair", "a b")


class Net(nn.Module):
    """A model at module level, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        """Double up."""
        return {"y": self.fc(x) * scale, "seen": x.dtype}


# -- What is cast ------------------------------------------------------------------------------------


def dtypes(module):
    return {name: t.dtype for name, t in module.state_dict().items() if t.is_floating_point()}


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_with_weights_stays_float32_with_its_statistics(norm):
    model = norm(3)
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert {t.dtype for t in (model.weight, model.bias, model.running_mean, model.running_var)} == {FP32}


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(3, affine=False), nn.InstanceNorm1d(3, affine=True), nn.LayerNorm(3), nn.GroupNorm(1, 3)]
)
def test_other_norms_are_cast_buffers_included(module):
    amp.initialize(module, opt_level="O2", verbosity=0)
    own = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    assert own
    assert {t.dtype for t in own} == {HALF}


def test_o3_casts_batch_norm_too():
    model = nn.BatchNorm1d(3)
    amp.initialize(model, opt_level="O3", verbosity=0)
    assert {model.weight.dtype, model.running_var.dtype} == {HALF}
    assert model.num_batches_tracked.dtype is torch.int64


def test_grads_are_cast_and_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model(torch.ones(1, 2)).sum().backward()
    amp.initialize(model, opt_level="O3", verbosity=0)
    assert model[0].weight is model[1].weight
    assert model[0].weight.grad.dtype is HALF


def test_o0_casts_float64_down_to_float32():
    model, _ = start("O0", model=net().double())
    assert model[0].weight.dtype is FP32
    assert model(data().double()).dtype is FP32


# -- What goes in and out ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_inputs_are_cast_and_outputs_are_float32(level):
    model, _ = start(level, model=Net())
    out = model(data(), scale=torch.ones((), dtype=torch.float64))
    assert out["seen"] is LOW_MODEL.get(level, FP32)
    assert out["y"].dtype is FP32
    assert model.forward(data())["y"].dtype is FP32


@pytest.mark.parametrize(("level", "wanted"), [("O2", torch.float64), ("O1", torch.float64), ("O0", HALF)])
def test_cast_model_outputs(level, wanted):
    model, _ = start(level, cast_model_outputs=wanted)
    assert model(data()).dtype is wanted


def test_o1_with_float32_model_type_casts_inputs_outputs_and_state_dicts():
    class Seen(nn.Linear):
        def forward(self, x):
            self.seen = x.dtype
            return super().forward(x)

    model, _ = start("O1", model=Seen(4, 2), cast_model_type=FP32)
    out = model(data().half())
    assert (model.seen, out.dtype) == (FP32, FP32)
    model, _ = start("O1", model=Seen(4, 2), cast_model_type=False)
    out = model(data().half())
    assert (model.seen, out.dtype) == (HALF, HALF)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_layers_take_float32_where_another_method_than_forward_calls_them(level):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net()
            self.cell = nn.GRU(3, 2, batch_first=True)
            self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

        def encode(self, x):
            x, _ = self.cell(self.layers(x)[None])
            return self.attention(x, x, x.float())[0]

        def forward(self, x):
            return self.encode(x)

    model, _ = start(level, model=Coder())
    assert model.encode(data()).dtype is LOW_MODEL[level]
    assert torch.equal(model.encode(data()).float(), model(data()))
    assert model.layers[0](data()).dtype is LOW_MODEL[level]
    twin = copy.deepcopy(model)
    assert twin.encode(data()).dtype is LOW_MODEL[level]
    assert isinstance(model.layers[0], nn.Linear)
    amp.shutdown()
    assert [type(m) for m in model.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert model.encode(data()).dtype is FP32


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_forward_that_calls_super_by_its_objects_class(level):
    class Derived(Net):
        def forward(self, *args, **kwargs):
            return super(self.__class__, self).forward(*args, **kwargs)

    model, _ = start(level, model=Derived())
    assert model(data())["seen"] is LOW_MODEL.get(level, FP32)
    assert model.__class__ is Derived


def test_forward_keeps_its_name_signature_and_doc():
    model, _ = start("O2", model=Net())
    assert model.forward.__doc__ == "Double up."
    assert model.forward.__func__.__wrapped__ is Net.forward
    assert isinstance(model, Net)
    assert (type(model).__name__, repr(model)) == ("Net", repr(Net()))


def test_a_forward_of_the_instances_own():
    model = Net()
    model.forward = lambda x: x.dtype
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model(data()) is HALF
    amp.shutdown()
    assert model(data()) is FP32
    assert "forward" in vars(model)


# -- Containers --------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: torch.Tensor

    def to(self, dtype):
        return Batch(self.x.to(dtype))


class Output(collections.OrderedDict):
    @property
    def x(self):
        return self["x"]


X, IDS = torch.ones(2), torch.ones(2, dtype=torch.int64)


def test_containers_keep_their_class():
    assert cast_tree([X, IDS], HALF)[0].dtype is HALF
    assert cast_tree(Pair(X, IDS), HALF).a.dtype is HALF
    assert cast_tree(Output(x=X), HALF).x.dtype is HALF
    default = cast_tree(collections.defaultdict(list, x=X), HALF)
    assert default["new"] == []
    assert default["x"].dtype is HALF
    assert [v.dtype for v in cast_tree((x for x in [X]), HALF)] == [HALF]
    assert cast_tree({1: (X,)}, HALF)[1][0].dtype is HALF


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"x",
        None,
        3,
        2.5,
        numpy.ones(2),
        range(3),
        IDS,
        [IDS],
        {"ids": IDS},
        Pair(1, 2),
        {1, 2},
        torch.Size([2]),
        HALF,
        torch.device("cpu"),
        torch.ones(2, dtype=torch.complex64),
        object(),
    ],
)
def test_what_has_nothing_to_cast_is_passed_itself(value):
    assert cast_tree(value, HALF) is value


def test_modules_as_arguments_are_left_alone():
    module = nn.Linear(1, 1)
    assert cast_tree({"m": [module]}, HALF)["m"][0] is module
    assert module.weight.dtype is FP32


def test_objects_with_to_are_asked():
    assert cast_tree([Batch(X)], HALF)[0].x.dtype is HALF
    packed = cast_tree(pack_padded_sequence(torch.ones(2, 1, 3), [2]), HALF)
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype is HALF
    assert packed.batch_sizes.dtype is torch.int64


def test_a_mapping_with_to_is_cast_item_by_item():
    class Encoding(collections.UserDict):
        def to(self, what):
            raise AssertionError("would cast the ids")

    found = cast_tree(Encoding(ids=IDS, mask=X), HALF)
    assert (type(found), found["ids"].dtype, found["mask"].dtype) == (Encoding, torch.int64, HALF)


# -- Copies ------------------------------------------------------------------------------------------


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_save])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_copies_run_their_own_forward(level, copied):
    model, optimizer = start(level, model=Net())
    step_once(model, optimizer)
    twin = copied(model)
    with torch.no_grad():
        twin.fc.weight.fill_(0)
        twin.fc.bias.fill_(7)
    out = twin(data())
    assert torch.equal(out["y"], torch.full((8, 2), 7.0))
    assert out["seen"] is LOW_MODEL.get(level, FP32)
    assert isinstance(twin, Net)
    assert not torch.equal(model(data())["y"], out["y"])
    assert {v.dtype for v in twin.state_dict().values()} == {FP32}


def step_once(model, optimizer):
    with amp.scale_loss(model(data())["y"].float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_replicas_of_data_parallel_run_their_own_forward(level):
    model, _ = start(level, model=Net())
    replica = model._replicate_for_data_parallel()
    replica.fc = nn.Linear(4, 2).to(model.fc.weight.dtype)
    out = replica(data())
    assert not torch.equal(out["y"], model(data())["y"])
    assert torch.equal(out["y"], replica(data())["y"])
    wrapped = nn.DataParallel(model)
    here = model.fc.weight.device  # with a card, there
    assert torch.equal(wrapped(data())["y"], model(data().to(here))["y"])


def test_a_copy_is_not_undone_by_shutdown_and_still_works():
    model, _ = start("O2", model=Net())
    twin = copy.deepcopy(model)
    amp.shutdown()
    assert twin(data())["y"].dtype is FP32
    assert twin.fc.weight.dtype is HALF


# -- State dicts -------------------------------------------------------------------------------------


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.fc(x)

    def get_extra_state(self):
        return {"note": "not a tensor"}

    def set_extra_state(self, state):
        self.note = state["note"]


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_state_dicts_are_float32_and_take_any_entry(level):
    model, _ = start(level, model=Extra())
    found = model.state_dict()
    assert found["_extra_state"] == {"note": "not a tensor"}
    assert {t.dtype for t in found.values() if isinstance(t, torch.Tensor)} == {FP32}
    assert {t.dtype for t in model.fc.state_dict().values()} == {FP32}
    if level != "O0":
        assert found["fc.weight"].data_ptr() != model.fc.weight.data_ptr()
    model.load_state_dict(found)
    assert model.note == "not a tensor"


def test_o1_state_dicts_are_the_models_own():
    model, _ = start("O1")
    assert model.state_dict()["0.weight"].data_ptr() == model[0].weight.data_ptr()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_dicts_hold_the_masters_values(level):
    model = net()
    exact = model[0].weight.detach().clone()
    model, optimizer = start(level, model=model)
    assert torch.equal(model.state_dict()["0.weight"], exact)
    step(model, optimizer, data())
    assert torch.equal(model.state_dict()["0.weight"], next(amp.master_params(optimizer)))
    assert torch.equal(model[0].state_dict()["weight"], next(amp.master_params(optimizer)))
