"""A DCGAN for apex: two models, two optimizers, three losses."""

import argparse

import torch
import torch.nn as nn
import torch.utils.data
from sklearn.datasets import load_digits

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.") from None

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1", help="amp opt_level, default='O1'")
parser.add_argument("--niter", type=int, default=2)
parser.add_argument("--manualSeed", type=int, default=0)
opt = parser.parse_args()
print(opt)
torch.manual_seed(opt.manualSeed)

digits = torch.tensor(load_digits().images[:512], dtype=torch.float32).unsqueeze(1) / 8 - 1
dataloader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(digits), batch_size=64, shuffle=True, drop_last=True
)
device = torch.device("cuda:0")
nz, ngf, ndf = 16, 16, 16


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)

for epoch in range(opt.niter):
    total = 0.0
    for (data,) in dataloader:
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = data.to(device)
        label = torch.full((real.size(0),), 1.0, device=device)
        errD_real = criterion(netD(real), label)
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        fake = netG(torch.randn(real.size(0), nz, 1, 1, device=device))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
        optimizerG.step()
        total += errD.item() + errG.item()
    print(f"[{epoch}/{opt.niter}] Loss {total / len(dataloader):.6f}")
