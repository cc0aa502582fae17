"""A causal language model over packed sequences, with the head that turns hidden states into logp and entropy."""

from typing import Any

import torch
from torch import nn

from spmdrl.policy.attention import plan_packing
from spmdrl_kernels import linear_logprob


class PackedLM(nn.Module):
    """HF causal LM whose forward gives logp and entropy of the sampled tokens, never logits [T, V].

    The HF model is the attribute `hf`, so parameter names are its own behind the prefix `hf.`.
    """

    hf: Any

    def __init__(self, hf: nn.Module, attention: str = "auto"):
        super().__init__()
        self.hf = hf
        self.attention = attention
        config = self.hf.config.get_text_config()
        # Families that scale or cap their logits say so in the config (Gemma 2; Granite; Cohere).
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.logit_divisor = getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0)

    def forward(
        self,
        tokens_T: torch.Tensor,
        lengths_B: torch.Tensor,
        mask_T: torch.Tensor,
        temperature: float,
        entropy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logp and entropy [T] (float32, float64 for float64 models), 0 where mask_T is False.

        tokens_T: int64 [T] packed. lengths_B: int64 [B] on the host. mask_T: bool [T]; False on first tokens.
        """
        device = tokens_T.device
        positions_T = torch.cat([torch.arange(n) for n in lengths_B.tolist()]).to(device)
        packing = plan_packing(lengths_B, device, self.attention)
        hidden_TD = self.hf.base_model(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, packing=packing
        ).last_hidden_state[0]
        rows = torch.nonzero(mask_T).flatten()
        # The state before a token predicts it. Rows outside the loss mask never reach the head.
        head = self.hf.get_output_embeddings()
        logp, ent = linear_logprob(
            hidden_TD.index_select(0, rows - 1),
            head.weight,
            tokens_T[rows],
            temperature * self.logit_divisor,
            entropy=entropy,
            softcap=self.softcap,
        )
        zeros = torch.zeros(len(tokens_T), dtype=logp.dtype, device=device)
        ent_T = zeros.index_copy(0, rows, ent) if ent is not None else zeros
        return zeros.index_copy(0, rows, logp), ent_T
