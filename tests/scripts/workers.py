"""DataLoader workers whose module imports apex, as the modules of whole code bases do."""

import argparse

import torch
import torch.nn as nn
from apex import amp
from apex.multi_tensor_apply import multi_tensor_applier
from torch.utils.data import DataLoader, Dataset

assert multi_tensor_applier is not None


class Points(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        from apex import amp as here  # a fresh process finds it too

        assert hasattr(here, "initialize")
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--start-method", default="fork")
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    loader = DataLoader(
        Points(),
        batch_size=32,
        shuffle=True,
        num_workers=1,
        pin_memory=True,
        multiprocessing_context=args.start_method,
        persistent_workers=True,
    )
    for epoch in range(3):
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} Loss {total / len(loader):.6f}")


if __name__ == "__main__":
    main()
