"""As apex's DCGAN example: two models, two optimizers and three losses."""

import argparse

import torch
import torch.nn as nn

try:
    from apex import amp
    from apex.optimizers import FusedAdam
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")  # noqa: B904

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O0")
opt = parser.parse_args()

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = FusedAdam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = FusedAdam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3, verbosity=0
)
noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
real = torch.randn(16, 2, generator=torch.Generator().manual_seed(2)) + 2
losses = []
for _ in range(15):
    netD.zero_grad()
    label = torch.ones(16, 1)
    errD_real = criterion(netD(real), label)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    fake = netG(noise)
    errD_fake = criterion(netD(fake.detach()), 1 - label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    losses += [errD_real.item() + errD_fake.item(), errG.item()]
dtypes = {p.dtype for p in netG.parameters()}
