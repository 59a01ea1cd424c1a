"""As BERT's pretraining of NVIDIA's: FusedLAMB, FusedLayerNorm, accumulation, and a reduction by amp_C and apex_C."""

import argparse

import amp_C
import apex_C
import torch
import torch.nn as nn
from apex import amp
from apex.amp import _amp_state
from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
from apex.optimizers import FusedLAMB

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O0")
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--overflow_at", type=int, default=-1)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(16, 16), BertLayerNorm(16, eps=1e-12)

    def forward(self, x):
        return self.LayerNorm(x + torch.nn.functional.gelu(self.dense(x)))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(10, 16), Block(), Block(), nn.Linear(16, 10))
no_decay = ["bias", "LayerNorm"]
named = list(model.named_parameters())
grouped = [
    {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = FusedLAMB(grouped, lr=0.05)
model, optimizer = amp.initialize(
    model, optimizer, opt_level=args.opt_level, loss_scale="dynamic", verbosity=0, cast_model_outputs=torch.float16
)
_amp_state.loss_scalers[0]._loss_scale = 2**12
overflow_buf = torch.zeros(1, dtype=torch.int32)


def take_optimizer_step():
    loss_scale = _amp_state.loss_scalers[0].loss_scale()
    master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat_raw = torch.empty(sum(p.numel() for p in master_grads), dtype=torch.float16)
    allreduced_views = apex_C.unflatten(flat_raw, master_grads)
    overflow_buf.zero_()
    scale = loss_scale / args.gradient_accumulation_steps
    amp_C.multi_tensor_scale(65536, overflow_buf, [master_grads, allreduced_views], scale)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [allreduced_views, master_grads], 1.0 / loss_scale)
    scaler = _amp_state.loss_scalers[0]
    old_overflow_buf, scaler._overflow_buf = scaler._overflow_buf, overflow_buf
    had_overflow = scaler.update_scale()
    scaler._overflow_buf = old_overflow_buf
    if had_overflow == 0:
        optimizer.step()
    elif _amp_state.opt_properties.master_weights:
        for param in optimizer._amp_stash.all_fp32_from_fp16_params:
            param.grad = None
    for param in model.parameters():
        param.grad = None
    return had_overflow


ids = torch.randint(0, 10, (64,), generator=torch.Generator().manual_seed(1))
losses, skipped = [], []
for step in range(12):
    for half in ids.chunk(args.gradient_accumulation_steps):
        loss = nn.functional.cross_entropy(model(half).float(), (half * 3 + 1) % 10)
        factor = float("inf") if step == args.overflow_at else 1.0
        with amp.scale_loss(loss * factor, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
    skipped.append(bool(take_optimizer_step()))
    losses.append(loss.item())
dtypes = {p.dtype for p in model.parameters()}
