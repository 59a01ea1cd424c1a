"""A BERT-style pretraining for apex: FusedLAMB, FusedLayerNorm, gradient accumulation, clipped masters."""

import argparse
import random

import torch
import torch.nn as nn
from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedLAMB

VOCABULARY, LENGTH, WIDTH, MASK = 64, 16, 32, 1


class Attention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask):
        split = (*hidden.shape[:2], self.heads, WIDTH // self.heads)
        q, k, v = (f(hidden).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / (WIDTH // self.heads) ** 0.5 + mask
        context = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.out(context.transpose(1, 2).reshape(hidden.shape))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1 = Attention(), FusedLayerNorm(WIDTH, eps=1e-12)
        self.up, self.down, self.norm2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), FusedLayerNorm(WIDTH, eps=1e-12)

    def forward(self, hidden, mask):
        hidden = self.norm1(hidden + self.attention(hidden, mask))
        return self.norm2(hidden + self.down(nn.functional.gelu(self.up(hidden))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = FusedLayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)

    def forward(self, ids, mask):
        mask = (1.0 - mask[:, None, None, :].to(dtype=next(self.parameters()).dtype)) * -10000.0
        hidden = self.norm(self.words(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return nn.functional.linear(hidden, self.words.weight) + self.bias


def batches(count, size):
    """Sentences that count upwards, with some words masked."""
    start = torch.randint(2, 6, (count, size, 1), generator=torch.Generator().manual_seed(5))
    tokens = (start + torch.arange(LENGTH) - 2) % (VOCABULARY - 2) + 2
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(6)) < 0.15
    return zip(tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, -1), strict=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true", help="Mixed precision training")
    parser.add_argument("--opt_level", default="O2")
    parser.add_argument("--max_steps", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    if torch.cuda.device_count() > 0:
        torch.cuda.manual_seed_all(args.seed)
    device = torch.device("cuda", torch.cuda.current_device())
    model = Bert().to(device)
    no_decay = ["bias", "norm"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(x in n for x in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(x in n for x in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedLAMB(groups, lr=args.learning_rate)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0]._loss_scale = 2**16
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    model.train()
    total = 0.0
    for step, (ids, labels) in enumerate(batches(args.max_steps * args.gradient_accumulation_steps, 16), 1):
        ids, labels = ids.to(device), labels.to(device)
        scores = model(ids, torch.ones_like(ids))
        loss = criterion(scores.view(-1, VOCABULARY).float(), labels.view(-1)) / args.gradient_accumulation_steps
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        total += loss.item()
        if step % args.gradient_accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer) if args.fp16 else model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % (4 * args.gradient_accumulation_steps) == 0:
                print(f"step {step // args.gradient_accumulation_steps} Loss {total / 4:.6f}")
                total = 0.0


if __name__ == "__main__":
    main()
