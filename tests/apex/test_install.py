"""``install``: the import blocks of scripts from the wild succeed, all of them, and leave nothing behind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest
import torch

import mpamp.apex
from mpamp.apex import amp
from mpamp.apex.absent import INSTEAD, AbsentModule
from mpamp.apex.errors import AmpNotImplementedError
from mpamp.apex.install import MODULES

BLOCKS = {
    "amp": "from apex import amp",
    "imagenet": """
        try:
            from apex.parallel import DistributedDataParallel as DDP
            from apex.fp16_utils import *
            from apex import amp, optimizers
            from apex.multi_tensor_apply import multi_tensor_applier
        except ImportError:
            raise ImportError("Please install apex.")
        assert network_to_half and prep_param_lists and multi_tensor_applier.available and optimizers.FusedSGD
    """,
    "timm": """
        try:
            from apex import amp
            from apex.parallel import DistributedDataParallel as ApexDDP
            from apex.parallel import convert_syncbn_model
            has_apex = True
        except ImportError:
            has_apex = False
        assert has_apex
    """,
    "attributes": """
        import apex
        assert apex.parallel.convert_syncbn_model and apex.parallel.DistributedDataParallel
        assert apex.parallel.SyncBatchNorm and apex.parallel.LARC and apex.parallel.Reducer
        assert apex.amp.initialize and apex.optimizers.FusedAdam and apex.normalization.FusedLayerNorm
        assert apex.fp16_utils.FP16_Optimizer and apex.mlp.MLP and apex.multi_tensor_apply.multi_tensor_applier
    """,
    "bert": """
        import amp_C
        import apex_C
        from apex import amp
        from apex.amp import _amp_state
        from apex.optimizers import FusedLAMB, FusedAdam
        from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
        from apex.parallel import DistributedDataParallel as DDP
        from apex.parallel.distributed import flat_dist_call
        from apex.multi_tensor_apply import multi_tensor_applier
        assert not isinstance(_amp_state, types.ModuleType) and amp_C.multi_tensor_l2norm and apex_C.flatten
    """,
    "squad of 2019": """
        from apex.optimizers import FP16_Optimizer
        from apex.optimizers import FusedAdam
        from apex.contrib.optimizers import FP16_Optimizer as other
        from apex.contrib.optimizers.fused_adam import FusedAdam as third
        from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer as fourth
        assert other is fourth is FP16_Optimizer and third is FusedAdam
    """,
    "modeling": """
        try:
            import apex
            import apex.normalization
            from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
            APEX_IS_AVAILABLE = True
        except ImportError:
            APEX_IS_AVAILABLE = False
        assert APEX_IS_AVAILABLE and BertLayerNorm is apex.normalization.FusedLayerNorm
    """,
    "t5": "from apex.normalization import FusedRMSNorm, MixedFusedRMSNorm, MixedFusedLayerNorm, manual_rms_norm",
    "functions of norms": """
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, mixed_dtype_fused_layer_norm_affine
        from apex.normalization.fused_layer_norm import fused_rms_norm, fused_rms_norm_affine, FusedRMSNorm
    """,
    "gan": """
        from apex.amp._amp_state import _amp_state, maybe_print, warn_or_err, master_params
        from apex import amp
        assert _amp_state is amp._amp_state
    """,
    "gradient penalty": """
        from apex.amp._amp_state import _amp_state
        from apex.amp.scaler import LossScaler
        from apex.amp.handle import scale_loss
        from apex.amp.opt import OptimWrapper
        from apex.amp.amp import half_function
    """,
    "levels": """
        from apex.amp.frontend import opt_levels, initialize, Properties
        from apex.amp import frontend
        assert set(opt_levels) >= {"O0", "O1", "O2", "O3"} and frontend.opt_levels is opt_levels
        assert opt_levels["O2"](Properties()).master_weights is True
    """,
    "lists": """
        from apex.amp.lists import functional_overrides, torch_overrides, tensor_overrides
        from apex.amp import lists, utils
        import apex.amp.lists.functional_overrides as again
        assert again is functional_overrides is lists.functional_overrides and "softmax" in again.FP32_FUNCS
        assert utils.is_fp_tensor(torch.ones(1))
    """,
    "swav": "import apex\nfrom apex.parallel.LARC import LARC\nassert apex.parallel.LARC is LARC",
    "larc": "from apex.parallel import LARC, Reducer, create_syncbn_process_group\nassert isinstance(LARC, type)",
    "syncbn": """
        from apex.parallel import SyncBatchNorm, convert_syncbn_model
        from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as optimized
        from apex.parallel.sync_batchnorm import SyncBatchNorm as plain
        assert optimized is plain is SyncBatchNorm
    """,
    "fp16": """
        from apex.fp16_utils import FP16_Optimizer, FP16Model, tofp16, BN_convert_float, to_python_float, clip_grad_norm
        from apex.fp16_utils import DynamicLossScaler, LossScaler, convert_network, convert_module
        from apex.fp16_utils.loss_scaler import DynamicLossScaler as D
        from apex.fp16_utils.fp16util import master_params_to_model_params, model_grads_to_master_grads
        from apex.fp16_utils.fp16_optimizer import FP16_Optimizer as F
        assert D is DynamicLossScaler and F is FP16_Optimizer
    """,
    "fused": """
        from apex.optimizers.fused_adam import FusedAdam
        from apex.optimizers.fused_sgd import FusedSGD
        from apex.optimizers.fused_lamb import FusedLAMB
        from apex.optimizers.fused_novograd import FusedNovoGrad
        from apex.optimizers.fused_adagrad import FusedAdagrad
        from apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
    """,
    "dense": "from apex.mlp import MLP\nfrom apex.fused_dense import FusedDense, FusedDenseGeluDense",
    "RNN": """
        from apex import RNN
        from apex.RNN import LSTM, mLSTM
        from apex.RNN.models import GRU
        assert RNN.LSTM is LSTM
    """,
    "megatron": """
        HAVE_APEX = True
        try:
            from apex.transformer import parallel_state, tensor_parallel
            from apex.transformer.enums import AttnMaskType, ModelType
            from apex.transformer.pipeline_parallel.utils import get_num_microbatches
            from apex.transformer.functional.fused_softmax import FusedScaleMaskSoftmax
            from apex.contrib.layer_norm.layer_norm import FastLayerNorm, _fast_layer_norm
        except (ImportError, ModuleNotFoundError):
            HAVE_APEX = False
        assert HAVE_APEX and FastLayerNorm(2)
        class Softmax(FusedScaleMaskSoftmax): pass
        class Both(torch.nn.Module, FusedScaleMaskSoftmax): pass
        def attention(mask=AttnMaskType.causal): return mask
    """,
    "contrib": """
        import apex.contrib.sparsity
        import apex.contrib.xentropy.softmax_xentropy as xentropy
        from apex import contrib, pyprof
        from apex.contrib.sparsity import ASP
        from apex.contrib.multihead_attn import SelfMultiheadAttn
        from apex.contrib.clip_grad import clip_grad_norm_
        from apex.reparameterization import apply_weight_norm, remove_weight_norm
        assert clip_grad_norm_ is torch.nn.utils.clip_grad_norm_ and contrib is apex.contrib
    """,
    "warnings": "import apex, warnings\nwarnings.filterwarnings('ignore', category=apex.DeprecatedFeatureWarning)",
}


@pytest.fixture
def _installed():
    before, names = set(sys.modules), set(vars(amp))
    mpamp.apex.install()
    yield
    mpamp.apex.uninstall()
    left = {name for name in set(sys.modules) - before if not name.startswith(("mpamp", "torch"))}
    assert [name for name in left if name.startswith(("apex", "amp_C"))] == []
    assert set(vars(amp)) == names
    assert importlib.util.find_spec("apex") is None


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", BLOCKS)
def test_import_blocks_of_scripts_succeed(name):
    import textwrap

    exec(textwrap.dedent(BLOCKS[name]), {"torch": torch, "types": types})


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_ours_by_both_ways_of_naming_it(name):
    module = importlib.import_module(name)
    assert module is importlib.import_module(MODULES[name])
    package, _, last = name.rpartition(".")
    if package:
        named = getattr(importlib.import_module(package), last)
        assert named is module or not isinstance(named, types.ModuleType)


@pytest.mark.usefixtures("_installed")
def test_what_is_not_in_apex_is_an_import_error():
    import apex

    for name in ("apex.nothing", "apex.parallel.nothing", "fused_layer_norm_cuda"):
        with pytest.raises(ImportError):
            importlib.import_module(name)
    with pytest.raises(ImportError):
        from apex import nothing  # noqa: F401
    assert not hasattr(apex, "nothing")
    assert importlib.util.find_spec("apex").name == "apex"


USES = {
    "apex.contrib.sparsity.ASP.prune_trained_model": "to_sparse_semi_structured",
    "apex.contrib.xentropy.SoftmaxCrossEntropyLoss.apply": "torch.nn.functional.cross_entropy",
    "apex.transformer.parallel_state.initialize_model_parallel": "Megatron Core",
    "apex.pyprof.nvtx.init": "torch.profiler",
    "apex.contrib.optimizers.distributed_fused_lamb.DistributedFusedLAMB": "FSDP",
    "apex.contrib.optimizers.DistributedFusedAdam": "FSDP",
    "apex.reparameterization.apply_weight_norm": "weight_norm",
    "apex.amp._process_optimizer._process_optimizer": "amp.initialize",
    "apex.contrib.never_heard_of": "what torch itself has",
}


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("use", USES)
def test_what_is_absent_says_so_where_it_is_called(use):
    package, *rest = use.split(".")
    value = importlib.import_module(package)
    for part in rest:
        value = getattr(value, part)
    if isinstance(value, types.ModuleType):
        value = value.anything
    with pytest.raises(AmpNotImplementedError, match=USES[use]) as caught:
        value(1, key=2)
    assert use in str(caught.value)


@pytest.mark.usefixtures("_installed")
def test_absent_classes_can_be_subclassed_and_asked_about():
    from abc import ABC

    from apex.transformer.functional import FusedScaleMaskSoftmax

    class Own(ABC, FusedScaleMaskSoftmax):
        def __init__(self):
            self.made = True

    assert not isinstance(1, FusedScaleMaskSoftmax)
    assert issubclass(Own, FusedScaleMaskSoftmax)
    with pytest.raises(AmpNotImplementedError, match=r"apex\.transformer\.functional\.FusedScaleMaskSoftmax"):
        Own()
    with pytest.raises(AttributeError):
        FusedScaleMaskSoftmax.__nothing__  # noqa: B018


def test_every_absent_module_names_something_to_use():
    assert all(text and not text.endswith(".") for text in INSTEAD.values())
    assert not [name for name in MODULES if isinstance(importlib.import_module(MODULES[name]), AbsentModule)]


def test_with_an_installed_apex_nothing_else_is_replaced(monkeypatch):
    real = types.ModuleType("apex")
    monkeypatch.setitem(sys.modules, "apex", real)
    mpamp.apex.install()
    try:
        assert importlib.import_module("apex.amp.frontend").opt_levels
        assert not hasattr(real, "parallel")
        assert "amp_C" not in sys.modules
        with pytest.raises(ImportError):
            importlib.import_module("apex.contrib.sparsity")
    finally:
        mpamp.apex.uninstall()
    assert vars(real).get("amp") is None
