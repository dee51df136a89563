"""The name `bluewalm.softplus_attention`: see memcheck.compat.softplus_attention."""

from memcheck.compat.softplus_attention import *  # noqa: F403
