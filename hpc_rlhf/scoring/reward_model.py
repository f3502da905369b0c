"""A frozen reward model beside the policy, on the same devices and under the same layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import DataConfig
from hpc_rlhf.data.dialogues import ASSISTANT, Dialogue
from hpc_rlhf.data.prompts import read_prompt
from hpc_rlhf.data.rendering import RenderingError, render, tokenize
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.memory import of_model
from hpc_rlhf.learner.packing import scored_item
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.models.megatron import PolicyModel
from hpc_rlhf.scoring.scorer import Scoring
from hpc_rlhf.types import Rollout, Scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Translation(Protocol):
    """Rollouts in the policy's tokens -> sequences in the reward model's."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[NDArray[np.integer] | str]:
        """Token ids of prompt and completion, or why there are none."""
        ...


class RewardModelScorer:
    """The score of the last token of prompt and completion, one number a rollout.

    Collective over the learner. It sweeps on the learner's devices, so that nothing of it goes on
    while others compute there.
    """

    def __init__(
        self,
        model: PolicyModel,
        runner: Runner,
        control: ControlGroup,
        *,
        max_tokens: int,
        max_failure_fraction: float,
        translation: Translation | None = None,
    ) -> None:
        """Args:
        model: frozen, with a score head and no other.
        runner: of the learner's layout.
        max_tokens: of a sequence that the model can read; a longer one is not scored.
        max_failure_fraction: of a batch, above which the attempt ends.
        translation: on the coordinator, where the tokenizers differ.
        """
        self._model = model
        self._runner = runner
        self._control = control
        self._max_tokens = max_tokens
        self._max_failure_fraction = max_failure_fraction
        self._translation = translation
        self._translates = control.broadcast(translation is not None)

    def start(self, rollouts: Sequence[Rollout]) -> Scoring:
        return _Sweep(self, rollouts)

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """Sweep ``rollouts``. Collective over the learner."""
        sequences: list[NDArray[np.integer] | str] = [r.token_ids for r in rollouts]
        if self._translates:
            made = self._translation(rollouts) if self._translation else []
            sequences = self._control.broadcast(made)
        excluded: dict[int, str] = {}
        items = []
        for i, sequence in enumerate(sequences):
            if isinstance(sequence, str):
                excluded[i] = sequence
            elif len(sequence) > self._max_tokens:
                excluded[i] = f"{len(sequence)} tokens, more than {self._max_tokens}"
            else:
                items.append((i, scored_item(sequence)))
        found = self._runner.read(self._model, [item for _, item in items]).scores
        assert found is not None
        rewards = np.full(len(rollouts), np.nan, np.float32)
        for (i, _), (score,) in zip(items, found, strict=True):
            rewards[i] = score
            if not np.isfinite(score):
                rewards[i], excluded[i] = np.nan, f"the reward model's score is {score}"
        if len(excluded) > self._max_failure_fraction * len(rollouts):
            raise ComponentError(
                f"scoring: the reward model could not score {len(excluded)} of {len(rollouts)} "
                f"samples, more than reward.max_failure_fraction={self._max_failure_fraction:g}; "
                f"one of them: {next(iter(excluded.values()))}"
            )
        return Scores(rewards=rewards, excluded=excluded)

    def memory(self) -> dict[str, float]:
        return of_model(self._model).as_metrics("reward")

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class _Sweep:
    """Done when it is asked for: the learner's devices are busy until then."""

    scorer: RewardModelScorer
    rollouts: Sequence[Rollout]

    def wait(self) -> None:
        """Nothing goes on elsewhere."""

    def result(self) -> Scores:
        return self.scorer.score(self.rollouts)


class ChatTranslation:
    """Text of the policy's tokens, rendered and tokenised again as the reward model was trained.

    A prompt of messages goes through the reward model's own chat template, with the completion as
    the assistant's next message; a prompt of text is continued by the completion.
    """

    def __init__(
        self,
        policy: "PreTrainedTokenizerBase",
        reward: "PreTrainedTokenizerBase",
        end_ids: Sequence[int],
        data: DataConfig,
    ) -> None:
        """Args:
        policy, reward: their tokenizers.
        end_ids: tokens that end an answer of the reward model's.
        data: how prompts are read from their records.
        """
        self._policy = policy
        self._reward = reward
        self._end_ids = tuple(end_ids)
        self._data = data

    def __call__(self, rollouts: Sequence[Rollout]) -> list[NDArray[np.integer] | str]:
        ids = [rollout.completion.token_ids.tolist() for rollout in rollouts]
        texts = self._policy.batch_decode(ids, skip_special_tokens=True)
        return [self._translate(r, text) for r, text in zip(rollouts, texts, strict=True)]

    def _translate(self, rollout: Rollout, text: str) -> NDArray[np.integer] | str:
        prompt = read_prompt(rollout.prompt.fields, self._data, place=rollout.prompt.uid)
        answer = text if isinstance(prompt, str) else ({"role": ASSISTANT, "content": text},)
        try:
            rendered = render(Dialogue(prompt, answer), self._reward)
            (made,) = tokenize([rendered], self._reward, self._end_ids, add_bos=self._data.add_bos)
        except RenderingError as error:
            return str(error)
        if isinstance(made, RenderingError):
            return str(made)
        ids = made.token_ids
        # One that was cut has no end, and the reward model must not see one.
        if rollout.completion.finish_reason == "length" and ids[-1] in self._end_ids:
            ids = ids[:-1]
        return ids
