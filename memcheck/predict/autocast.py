"""torch.autocast for meta tensors, on which torch's own autocast has no effect, with the rules of the CPU or CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of functions that run in the lower precision. CUDA's lists were compared with torch 2.13's ATen/autocast_mode.h;
# those of the CPU, which are in no header, were not.
LOWER = words("""
    linear matmul __matmul__ mm bmm addmm addbmm baddbmm einsum linalg_vecdot linalg_multi_dot chain_matmul
    scaled_dot_product_attention conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    """)
ON_CUDA_ONLY = words("addmv addr mv prelu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
OURS = {"softplus_attention", "linear_attention", "compressed_attention", "combinator", "linear_r", "linear_l"}
LOSSES = words("""
    binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy cross_entropy_loss ctc_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss nll_loss_nd
    nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    """)
# Names of functions that run in float32.
FLOAT32 = {
    "cpu": LOSSES
    | words("avg_pool3d binary_cross_entropy grid_sampler polar prod quantile nanquantile stft cdist trace"),
    "cuda": LOSSES
    | words("""
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
        native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity cosine_embedding_loss dist
        pdist cdist renorm logsumexp prod softmax log_softmax cumprod cumsum sum norm
        linalg_vector_norm linalg_matrix_norm upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        """),
}


class AutocastOnMeta(TorchFunctionMode):
    """Autocast by torch's lists of functions. It caches casts of parameters until it ends, as torch does.

    kind: "cpu" or "cuda", whose lists differ.
    """

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self._kept: dict[int, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kept.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without the overload, as in torch.ops.memcheck.softplus_attention.default.
        name = getattr(func, "__name__", "").partition(".")[0]
        in_lower = name in LOWER or name in OURS or (self.kind == "cuda" and name in ON_CUDA_ONLY)
        dtype = self.dtype if in_lower else None
        if name in FLOAT32[self.kind]:
            dtype = torch.float32
        args, kwargs = tree_map(lambda part: self._cast(part, dtype), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cast(self, part: Any, dtype: torch.dtype | None) -> Any:
        """Casts a tensor. float64 stays unchanged."""
        if dtype is None or not isinstance(part, Tensor) or not part.is_floating_point() or part.dtype == torch.float64:
            return part
        if part.dtype == dtype:
            return part
        if not (part.is_leaf and part.requires_grad and dtype == self.dtype):
            return part.to(dtype)
        if id(part) not in self._kept:
            self._kept[id(part)] = part.to(dtype)
        return self._kept[id(part)]
