"""The attentions in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from zoo_of_models import loaded

from memcheck.nn import Decoder

pytestmark = [pytest.mark.ci, pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
VOCABULARY = 13


@pytest.fixture(scope="module")
def lightning(require_package: Callable[[str], None]) -> Any:
    require_package("lightning")
    loaded().with_stubs_of_torchvision()  # Its metrics import torchvision where that is installed.
    import lightning.pytorch

    return lightning.pytorch


def decoder(attention: str, checkpointing: bool = False) -> Decoder:
    torch.manual_seed(1)
    sizes = {"dim": 8, "feed_forward_dim": 12, "layers": 2, "heads": 2, "context": 20, "factor": 3}
    return Decoder(VOCABULARY, attention=attention, checkpointing=checkpointing, **sizes)


def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Of each token (B,S) from those before it."""
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("attention", ["softplus", "linear", "compressed"])
def test_a_trainer_takes_the_steps_of_a_plain_loop(
    lightning: Any, attention: str, precision: str, checkpointing: bool, tmp_path: Path
) -> None:
    """Two steps on the CPU give the same weights, bit for bit, and Lightning's file of weights has them."""
    batches = torch.randint(VOCABULARY, (2, 3, 12), generator=torch.Generator().manual_seed(2))

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder(attention, checkpointing)

        def training_step(self, ids: Tensor) -> Tensor:
            return loss_of(self.model, ids)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        precision=precision,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(Training(), torch.utils.data.DataLoader(batches, batch_size=None))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    found = Training.load_from_checkpoint(tmp_path / "saved.ckpt").model.state_dict()

    plain = decoder(attention)
    optimizer = sgd(plain)
    before = plain.embedding.weight.detach().clone()
    for ids in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = loss_of(plain, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert trainer.global_step == 2
    assert not torch.equal(plain.embedding.weight, before)
    for name, weight in plain.state_dict().items():
        assert torch.equal(found[name], weight), name
