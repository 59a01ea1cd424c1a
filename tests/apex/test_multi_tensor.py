"""amp_C's and apex_C's functions through multi_tensor_applier, with flags for inf and NaN."""

from __future__ import annotations

import pytest
import torch

from mpamp.apex.multi_tensor import (
    flatten,
    multi_tensor_applier,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    unflatten,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def flag():
    return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_scale(source, target):
    sources = [torch.tensor([2.0, 4.0], dtype=source), torch.tensor([[8.0]], dtype=source)]
    targets = [torch.zeros(2, dtype=target), torch.zeros(1, 1, dtype=target)]
    raised = flag()
    assert multi_tensor_applier(multi_tensor_scale, raised, [sources, targets], 0.25) is None
    assert [t.tolist() for t in targets] == [[0.5, 1.0], [[2.0]]]
    assert [t.tolist() for t in sources] == [[2.0, 4.0], [[8.0]]]
    assert (raised.item(), raised.dtype) == (0, torch.int32)


def test_scale_multiplies_in_float32():
    source, target = torch.full((1,), 1024.0, dtype=torch.float16), [torch.zeros(1)]
    multi_tensor_applier(multi_tensor_scale, flag(), [[source], target], 1024.0)
    assert target[0].item() == 2.0**20


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flags(bad, dtype):
    good, spoilt = torch.ones(2, dtype=dtype), torch.tensor([1.0, bad], dtype=dtype)
    raised = flag()
    multi_tensor_applier(multi_tensor_scale, raised, [[good, spoilt], [torch.ones(2), torch.ones(2)]], 1.0)
    assert raised.item() == 1
    for checked, wanted in ((-1, 1), (0, 0), (1, 1)):
        raised = flag()
        multi_tensor_applier(multi_tensor_axpby, raised, [[good], [spoilt], [torch.ones(2)]], 1.0, 1.0, checked)
        assert raised.item() == wanted


def test_axpby():
    xs, ys, out = [torch.ones(2, dtype=torch.float16)], [torch.full((2,), 3.0)], [torch.zeros(2, dtype=torch.bfloat16)]
    multi_tensor_applier(multi_tensor_axpby, flag(), [xs, ys, out], 2.0, -1.0)
    assert out[0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype):
    tensors = [torch.tensor([3.0], dtype=dtype), torch.tensor([0.0, 4.0], dtype=dtype)]
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag(), [tensors], True)
    assert (total.tolist(), each.tolist(), total.dtype) == ([5.0], [3.0, 4.0], torch.float32)
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag(), [tensors], False)
    assert (total.tolist(), each.numel()) == ([5.0], 0)
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag(), [[]], True)
    assert (total.tolist(), each.tolist()) == ([0.0], [])


def test_flat_and_back():
    tensors = [torch.ones(2, 2), torch.zeros(3)]
    flat = flatten(tensors)
    assert flat.tolist() == [1.0] * 4 + [0.0] * 3
    parts = unflatten(flat, tensors)
    assert [part.shape for part in parts] == [tensor.shape for tensor in tensors]
    parts[0].fill_(5.0)
    assert flat[0].item() == 5.0


def test_the_applier_is_available():
    assert multi_tensor_applier.available is True
    assert multi_tensor_applier.chunk_size == 65536
    multi_tensor_applier(multi_tensor_scale, flag(), [[], []], 1.0)
