"""The name `bluewalm`, for client code of the closed module of that name. What stands behind it is memcheck's own."""

from memcheck.compat import extension as extension

from . import softplus_attention as softplus_attention
