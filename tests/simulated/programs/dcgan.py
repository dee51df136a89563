"""Trains a deep convolutional GAN on random images, after the DCGAN of pytorch/examples."""

import argparse
import os
import random

import torch
from torch import nn


def weights_init(module):
    if "Conv" in type(module).__name__:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in type(module).__name__:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator(nz, ngf):
    return nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(ngf * 8),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 8, ngf * 4, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf * 4),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(ndf):
    return nn.Sequential(
        nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, ndf * 4, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ndf * 4),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 4, 1, 8, 1, 0, bias=False),
        nn.Flatten(0),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--nz", type=int, default=100)
    parser.add_argument("--nf", type=int, default=64)
    parser.add_argument("--niter", type=int, default=5)
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--outf", default="gan")
    opt = parser.parse_args()
    os.makedirs(opt.outf, exist_ok=True)
    random.seed(opt.images)
    torch.manual_seed(random.randint(1, 10000))

    device = "cuda:0"
    netG, netD = generator(opt.nz, opt.nf).to(device), discriminator(opt.nf).to(device)
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    fixed_noise = torch.randn(opt.batch_size, opt.nz, 1, 1, device=device)
    images = torch.utils.data.TensorDataset(torch.rand(opt.images, 3, 32, 32) * 2 - 1)
    dataloader = torch.utils.data.DataLoader(images, opt.batch_size, shuffle=True)

    for epoch in range(opt.niter):
        for i, (real,) in enumerate(dataloader):
            real = real.to(device)
            label = torch.full((len(real),), 1.0, device=device)
            noise = torch.randn(len(real), opt.nz, 1, 1, device=device)
            fake = netG(noise)
            netD.zero_grad()
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            errD_fake = criterion(netD(fake.detach()), label.fill_(0.0))
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), label.fill_(1.0))
            errG.backward()
            optimizerG.step()
            if i % 5 == 0:
                print(f"[{epoch}/{opt.niter}][{i}] Loss_D: {errD_real + errD_fake:.4f} Loss_G: {errG.item():.4f}")
        with torch.no_grad():
            torch.save(netG(fixed_noise).cpu(), f"{opt.outf}/fake_samples_epoch_{epoch}.pt")
        torch.save(netG.state_dict(), f"{opt.outf}/netG_epoch_{epoch}.pth")


if __name__ == "__main__":
    main()
