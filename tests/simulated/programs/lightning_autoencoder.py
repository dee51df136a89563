"""Trains an autoencoder as a LightningModule, with validation and checkpoints."""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(pl.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, width), nn.GELU(), nn.Linear(width, 32))
        self.decoder = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 28 * 28))

    def loss(self, batch):
        x = batch[0].flatten(1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-epochs", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--folder", default="checkpoints")
    args = parser.parse_args()

    pl.seed_everything(0)
    train = TensorDataset(torch.rand(2048, 1, 28, 28))
    val = TensorDataset(torch.rand(512, 1, 28, 28))
    checkpoint = ModelCheckpoint(args.folder, filename="best", monitor="val_loss", save_last=True)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=args.max_epochs,
        precision=args.precision,
        gradient_clip_val=1.0,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
    )
    model = LitAutoEncoder(args.width, 1e-3)
    trainer.fit(model, DataLoader(train, args.batch_size, shuffle=True), DataLoader(val, args.batch_size))
    print("best:", checkpoint.best_model_path, checkpoint.best_model_score)


if __name__ == "__main__":
    main()
