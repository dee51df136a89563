"""One product of numbers: what stays allocated after it is the workspace of cuBLAS.

After github.com/pytorch/pytorch/issues/95668.
"""

import torch


def multiply() -> None:
    model = torch.nn.Linear(1, 1, device="cuda")
    model(torch.randn(1, 1, device="cuda"))


multiply()
torch.cuda.synchronize()
print("I01", torch.cuda.memory_allocated())
