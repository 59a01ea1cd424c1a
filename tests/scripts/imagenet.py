"""An ImageNet-like training for apex: O0 to O3, its DDP, FusedSGD, a prefetcher on a stream of its own."""

import argparse
import os
import time

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
from sklearn.datasets import load_digits

try:
    from apex import amp, optimizers
    from apex.parallel import DistributedDataParallel as DDP
    from apex.parallel import convert_syncbn_model
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.") from None


def parse():
    parser = argparse.ArgumentParser(description="digits, as ImageNet")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=64, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--seed", default=0, type=int)
    return parser.parse_args()


class data_prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.3]).cuda().view(1, 1, 1, 1)
        self.std = torch.tensor([0.35]).cuda().view(1, 1, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().div_(16)
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
        if target is not None:
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.down(x))


def resnet():
    return nn.Sequential(Block(1, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


def main():
    args = parse()
    print(f"opt_level = {args.opt_level}", f"keep_batchnorm_fp32 = {args.keep_batchnorm_fp32}")
    cudnn.benchmark = True
    torch.manual_seed(args.seed)
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."
    args.distributed = "WORLD_SIZE" in os.environ
    args.world_size = 1
    if args.distributed:
        torch.cuda.set_device(args.local_rank)
        dist.init_process_group(backend="nccl", init_method="env://")
        args.world_size = dist.get_world_size()

    model = resnet()
    if args.sync_bn:
        print("using apex synced BN")
        model = convert_syncbn_model(model)
    model = model.cuda()
    optimizer = optimizers.FusedSGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()

    digits = load_digits()
    dataset = torch.utils.data.TensorDataset(
        torch.tensor(digits.images[:512], dtype=torch.uint8).unsqueeze(1), torch.tensor(digits.target[:512])
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, num_workers=0, pin_memory=True, drop_last=True
    )
    for epoch in range(args.epochs):
        start = time.time()
        loss = train(loader, model, criterion, optimizer, args)
        torch.cuda.synchronize()
        if args.local_rank == 0:
            print(f"Epoch: [{epoch}]\tSpeed {len(dataset) / (time.time() - start):.0f}\tLoss {loss:.6f}")
    if args.distributed:
        dist.destroy_process_group()


def train(loader, model, criterion, optimizer, args):
    model.train()
    prefetcher = data_prefetcher(loader)
    input, target = prefetcher.next()
    losses = []
    while input is not None:
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        reduced = reduce_tensor(loss.data, args.world_size) if args.distributed else loss.data
        losses.append(reduced.item())
        input, target = prefetcher.next()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
