"""Inner attention for the CPU: torch SDPA under TorchTitan's per-document masks.

FlexAttention has no backward on the CPU and varlen attention is a CUDA kernel. Shape suffixes as in TorchTitan:
B batch, L sequence, N heads, H head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask
from torchtitan.models.common.attention import FlexAttention

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def create_boolean_mask(
    mask_mod: Callable[..., torch.Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    **block_options: Any,
) -> torch.Tensor:
    """Stand-in for TorchTitan's ``create_attention_mask``: the same ``mask_mod`` written out in full.

    ``block_options`` (block size, separate full blocks) only shape a sparse ``BlockMask`` and do not apply.

    Returns:
        Boolean mask of shape (B or 1, H or 1, Q_LEN, KV_LEN), True where a query may see a key; one byte an element.
    """
    return create_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=device or "cpu")


class DocSDPA(FlexAttention):
    """Drop-in for ``FlexAttention`` on ``torch.nn.functional.scaled_dot_product_attention``.

    It subclasses FlexAttention because TorchTitan builds masks only for Flex and Varlen configurations. The masks
    must be boolean, as :func:`create_boolean_mask` makes them, and let each query see at least one key.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Same fields as FlexAttention, so that they survive the substitution; none has an effect on SDPA."""

    # The names of the first three parameters are a contract: TorchTitan's sharding specifications are keyed by them.
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None,  # type: ignore[override]
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention output of shape (B, L, N, H of v).

        Args:
            q_BLNH: Queries; k_BLNH, v_BLNH: keys and values, with fewer heads under ``enable_gqa``; v may have
                another head size (multi-head latent attention).
            attention_masks: Boolean, (B or 1, 1, L, L).
            score_mod: Must be None.
            scale: Factor on the scores; default 1/sqrt(H).
            enable_gqa: Whether several query heads share one key/value head.
            out_transform: Epilogue on (output, log-sum-exp of the scores in (B, L, N), fp32), as gpt_oss needs for
                its attention sinks; takes a dense path with B x N x L x L scores in memory.

        Raises:
            TypeError: ``attention_masks`` is not a boolean tensor.
            NotImplementedError: ``score_mod`` is given.
        """
        if not isinstance(attention_masks, torch.Tensor) or attention_masks.dtype != torch.bool:
            raise TypeError(
                f"DocSDPA needs a boolean attention mask but got {type(attention_masks).__name__}: call "
                "torchtitan_diloco.cpu.install() before training, and let the data loader yield 'positions'"
            )
        if score_mod is not None:
            raise NotImplementedError("attention with a score_mod is not available on the CPU")
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if out_transform is not None:
            out_BNLH, lse_BNL = dense_attention_with_lse(q_BNLH, k_BNLH, v_BNLH, attention_masks, scale)
            return out_transform(out_BNLH.transpose(1, 2), lse_BNL.transpose(1, 2))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)


def dense_attention_with_lse(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    mask_BNLL: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention written out, in fp32 or wider, because SDPA on the CPU gives no log-sum-exp.

    Returns:
        Output (B, N, L, H of v) in the type of the queries and the natural log-sum-exp of the scores (B, N, L).
    """
    compute = torch.promote_types(q_BNLH.dtype, torch.float32)
    q, k, v = (x.to(compute) for x in (q_BNLH, k_BNLH, v_BNLH))
    heads_per_kv = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads_per_kv, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask_BNLL, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v
    return out.to(q_BNLH.dtype), lse
