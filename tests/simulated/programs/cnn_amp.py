"""Trains a small residual network on images of random pixels, with mixed precision and a learning rate schedule."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomImages(Dataset):
    def __init__(self, length, size, classes):
        self.length, self.size, self.classes = length, size, classes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % self.classes


class Block(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x):
        y = nn.functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return nn.functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", default="cnn.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(
        Block(3, 64, 1),
        Block(64, 128, 2),
        Block(128, 256, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    ).to(device)
    data = RandomImages(args.images, 32, 10)
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = torch.amp.GradScaler(device.type)

    for epoch in range(args.epochs):
        model.train()
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.float16):
                output = model(images)
                loss = nn.functional.cross_entropy(output, labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % 4 == 0:
                correct = (output.argmax(1) == labels).sum().item()
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}, correct {correct}/{len(labels)}")
        scheduler.step()
        print(f"epoch {epoch} done, {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(args)}, args.save)


if __name__ == "__main__":
    main()
