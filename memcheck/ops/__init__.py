"""The operators, their derivatives, references and checks."""

import torch  # noqa: F401  (first: another thread that imports it registers the operators before this one goes on)

import memcheck._extension  # noqa: F401  (registers torch.ops.memcheck)
