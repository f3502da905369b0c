"""What Hugging Face computes in fp32 from the same weights."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from hpc_rlhf.types import Rollout


class Reference:
    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: NDArray[np.int32], prompt_length: int) -> torch.Tensor:
        """Logits that predict each token after the prompt, [T, vocabulary]."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return self.model(ids).logits[0, prompt_length - 1 : -1]

    def is_greedy(self, rollout: Rollout) -> bool:
        """Whether each token of the completion is the most likely one after those before it."""
        logits = self.logits(rollout.token_ids, len(rollout.prompt.token_ids))
        return bool((logits.argmax(-1).numpy() == rollout.completion.token_ids).all())

    def log_probs(
        self,
        tokens: NDArray[np.int32],
        prompt_length: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> NDArray[np.float32]:
        """Log-probabilities under the distribution after temperature, top-k and top-p, [T]."""
        logits = self.logits(tokens, prompt_length) / temperature
        if top_k:
            kept = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kept, -torch.inf)
        if top_p < 1:
            ordered, order = logits.sort(descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
            logits = logits.masked_fill(dropped, -torch.inf)
        sampled = torch.from_numpy(tokens[prompt_length:].astype(np.int64))
        return logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0].numpy()
