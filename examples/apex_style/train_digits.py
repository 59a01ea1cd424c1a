"""Train a small CNN on scikit-learn's digits, written the way scripts for NVIDIA's apex are.

mpamp run --device cpu examples/apex_style/train_digits.py --opt-level O2
mpamp run examples/apex_style/train_digits.py --opt-level O1 --loss-scale 128.0
torchrun --nproc-per-node 2 --no-python mpamp run examples/apex_style/train_digits.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_args():
    parser = argparse.ArgumentParser(description="digits with apex.amp")
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--batch-size", default=64, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--opt-level", default="O1", type=str)
    parser.add_argument("--keep-batchnorm-fp32", default=None, type=str)
    parser.add_argument("--loss-scale", default=None, type=str)
    parser.add_argument("--max-norm", default=5.0, type=float)
    parser.add_argument("--checkpoint", default="", type=str, help="written after every epoch")
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--stop-after", default=0, type=int, help="end the run after this many epochs")
    return parser.parse_args()


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    return (images[:1500].cuda(), labels[:1500].cuda()), (images[1500:].cuda(), labels[1500:].cuda())


def train(train_set, model, optimizer, args, epoch):
    model.train()
    images, labels = train_set
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed + epoch))
    for batch in order.split(args.batch_size):
        batch = batch[args.rank :: args.world_size].to(images.device)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()
    return loss.item()


def validate(test_set, model):
    model.eval()
    images, labels = test_set
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main():
    args = parse_args()
    args.world_size, args.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    args.distributed = "WORLD_SIZE" in os.environ
    if args.distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(args.seed)

    model = build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        amp.load_state_dict(checkpoint["amp"])
        start = checkpoint["epoch"]
    net = DDP(model) if args.distributed else model

    train_set, test_set = load_data()
    for epoch in range(start, args.stop_after or args.epochs):
        loss = train(train_set, net, optimizer, args, epoch)
        scheduler.step()
        accuracy = validate(test_set, net)
        if args.rank == 0:
            print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.4f}")
            if args.checkpoint:
                torch.save(
                    {
                        "epoch": epoch + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "amp": amp.state_dict(),
                    },
                    args.checkpoint,
                )
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
