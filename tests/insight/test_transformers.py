"""A trace counts the casts of models of transformers as a dispatch mode does, and finds what is known of T5."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp

transformers = pytest.importorskip("transformers")
WORDS = torch.arange(64).reshape(4, 16) % 97


class Casts(TorchDispatchMode):
    """Counts the casts between floating dtypes, and the matrix products by the dtype of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.products: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy" and args[0].is_floating_point() and result.is_floating_point():
            self.count += args[0].dtype is not result.dtype
        elif name in ("aten::mm", "aten::addmm"):
            self.products[result.dtype] += 1
        return result


def _bert() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=100, max_position_embeddings=32, **sizes)
    return transformers.BertModel(config), {"input_ids": WORDS, "attention_mask": torch.ones_like(WORDS)}


def _gpt2() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=32, **special)
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config), {"input_ids": WORDS, "labels": WORDS}


def _t5() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=100, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": WORDS, "labels": WORDS}


def _casts_within_attention(model: torch.nn.Module, inputs: dict[str, Tensor]) -> int:
    """Count those of attention itself, which computes in float32 where its mask has a gradient, as T5's bias."""
    with torch.autograd.profiler.profile() as profile:
        model(**inputs)
    casts = [event for event in profile.function_events if event.name == "aten::_to_copy"]
    return sum(c.cpu_parent.cpu_parent.name == "aten::_scaled_dot_product_attention_math" for c in casts if _has(c))


def _has(event: Any) -> bool:
    return event.cpu_parent is not None and event.cpu_parent.cpu_parent is not None


MODELS = {"bert": _bert, "gpt2": _gpt2, "t5": _t5}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [True, False])
def test_casts_are_those_that_a_dispatch_mode_counts(name: str, dtype: torch.dtype, grad: bool) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with torch.set_grad_enabled(grad), mpamp.autocast("cpu", dtype), Casts() as independent:
        model(**inputs)
    with torch.set_grad_enabled(grad), mpamp.trace() as seen, mpamp.autocast("cpu", dtype):
        model(**inputs)
    with torch.set_grad_enabled(grad), mpamp.autocast("cpu", dtype):
        within = _casts_within_attention(model, inputs)
    assert within == (20 if name == "t5" and grad else 0)  # four attentions: three arguments up, two results down
    asked_for = sum(use.calls for use in seen.uses if use.op == "aten::_to_copy")
    assert seen.casts + asked_for + within == independent.count
    assert seen.casts > 20
    products = ("aten::linear", "aten::addmm")
    low = [use for use in seen.uses if use.op in products and use.dtypes_out == (str(dtype).removeprefix("torch."),)]
    assert sum(use.calls for use in low) == independent.products[dtype] >= 9


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_nothing_is_found_of_clean_ones(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with mpamp.autocast("cpu", torch.bfloat16):
        assert mpamp.explain(model, **inputs).findings == ()


def test_t5s_cast_to_float32_that_autocast_undoes_is_found() -> None:
    """Its ``wo`` is cast to float32 by hand, against overflows in float16; autocast takes it back."""
    torch.manual_seed(0)
    model, inputs = _t5()
    with mpamp.autocast("cpu", torch.float16):
        found = [f for f in mpamp.explain(model, **inputs).findings if f.kind == "round trip"]
    assert len(found) == 1
    assert "T5DenseActDense takes float16 to float32" in found[0].text
    assert found[0].calls == 4
    with mpamp.module_rules(model, {"*.wo": "fp32"}), mpamp.autocast("cpu", torch.float16):
        assert not [f for f in mpamp.explain(model, **inputs).findings if f.kind == "round trip"]


@pytest.mark.parametrize("name", MODELS)
def test_no_overflow_is_found_of_them(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    finder = mpamp.find_overflow(
        model.eval(),
        **inputs,
        loss=lambda output: output[0][..., :8].float().square().mean() if output[0].dim() else output[0],
        region=mpamp.autocast("cpu", torch.float16),
        scaler=mpamp.GradScaler("cpu", 2.0**10),
    )
    assert finder.steps == 1
    assert [report.overflow for report in finder.reports if report.overflow is not None] == []  # underflow there may be
