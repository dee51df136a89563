"""A batched product with an expanded matrix: autocast copies the matrix for every element of the batch.

After github.com/pytorch/pytorch/issues/85698. The output, which keeps the operands, is alive when
the memory is read.
"""

import torch
from torch import Tensor, nn


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.randn(41292, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        return self.base.expand(x.shape[0], -1, -1).bmm(x)


device = torch.device("cuda")
model = Product().to(device)
for is_cast in (True, False):
    for _ in range(3):
        with torch.autocast("cuda", torch.float16, enabled=is_cast):
            output = model(torch.randn((1024, 64), requires_grad=True, device=device))
            torch.cuda.empty_cache()
            used = torch.cuda.memory_allocated()
    print("I02.amp" if is_cast else "I02.off", used)
