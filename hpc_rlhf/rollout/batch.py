"""The batch of one step while it is sampled: in one round, or in several with dynamic sampling. Pure.

Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11) learns from groups whose samples differ in reward:
the others have no advantage. Prompts whose samples all got the same reward are replaced by further
ones, in a bounded number of rounds; what is still missing then is filled with the ones left over, so
that a batch has always as many groups. Which prompts those are follows from the prompts' order and the
rewards, so that a resumed step asks for the same ones.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpc_rlhf.rollout.sampler import SampleRequest
from hpc_rlhf.types import Prompt, Rollout, Scores, sample_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Samples of a step, in the order of their requests, and their scores as far as there are any."""

    step: int
    prompts: int  # groups to learn from
    max_rounds: int = 1  # rounds of sampling
    rounds: int = 0  # that were scored
    rollouts: tuple[Rollout, ...] = ()
    scores: Scores | None = None  # of the first of them, of all when a round is scored

    @property
    def is_dynamic(self) -> bool:
        return self.max_rounds > 1

    @property
    def wanted(self) -> int:
        """Prompts to sample in the next round; 0: the batch is whole."""
        if self.rounds == 0:
            return self.prompts
        if self.rounds == self.max_rounds:
            return 0
        return max(self.prompts - len(self._informative()), 0)

    @property
    def fresh(self) -> tuple[Rollout, ...]:
        """Samples without a score."""
        return self.rollouts[len(self.scores.rewards) if self.scores else 0 :]

    def sampled(self, rollouts: Sequence[Rollout]) -> "StepBatch":
        """The batch with a round's samples."""
        return replace(self, rollouts=(*self.rollouts, *rollouts))

    def scored(self, scores: Scores) -> "StepBatch":
        """The batch with the scores of :attr:`fresh`: a round is done."""
        first = 0 if self.scores is None else len(self.scores.rewards)
        before = np.zeros(0, np.float32) if self.scores is None else self.scores.rewards
        excluded = {} if self.scores is None else dict(self.scores.excluded)
        excluded |= {first + i: reason for i, reason in scores.excluded.items()}
        rewards = np.concatenate([before, scores.rewards])
        return replace(
            self, rounds=self.rounds + 1, scores=Scores(rewards=rewards, excluded=excluded)
        )

    def whole(self) -> "StepBatch":
        """What is learned from: with dynamic sampling the groups that differ in reward first.

        Groups of the order in which they were sampled; excluded samples stay in theirs.
        """
        if not self.is_dynamic or self.scores is None:
            return self
        informative = self._informative()[: self.prompts]
        others = [uid for uid in self._groups() if uid not in informative]
        chosen = {*informative, *others[: self.prompts - len(informative)]}
        kept = [i for i, r in enumerate(self.rollouts) if r.prompt.uid in chosen]
        position = {i: new for new, i in enumerate(kept)}
        scores = Scores(
            rewards=self.scores.rewards[kept],
            excluded={position[i]: r for i, r in self.scores.excluded.items() if i in position},
        )
        return replace(self, rollouts=tuple(self.rollouts[i] for i in kept), scores=scores)

    def metrics(self) -> dict[str, float]:
        """How many groups were sampled, and why; nothing without dynamic sampling."""
        if not self.is_dynamic:
            return {}
        informative = len(self._informative())
        groups = len(self._groups())
        return {
            "dynamic/rounds": float(self.rounds),
            "dynamic/groups": float(groups),
            "dynamic/uninformative": float(groups - informative),
            "dynamic/filled": float(max(self.prompts - informative, 0)),
        }

    def _groups(self) -> list[str]:
        """Prompts by uid, in the order of their first samples."""
        return list(dict.fromkeys(rollout.prompt.uid for rollout in self.rollouts))

    def _informative(self) -> list[str]:
        """Those whose scored samples differ in reward."""
        rewards: dict[str, set[float]] = {}
        assert self.scores is not None
        for i, (rollout, reward) in enumerate(
            zip(self.rollouts, self.scores.rewards.tolist(), strict=True)
        ):
            of_group = rewards.setdefault(rollout.prompt.uid, set())
            if i not in self.scores.excluded:
                of_group.add(reward)
        return [uid for uid, of_group in rewards.items() if len(of_group) > 1]


def sample_requests(
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    seed: int,
    step: int,
    *,
    before: Sequence[Rollout] = (),
) -> list[SampleRequest]:
    """The requests of one round of a step, each with its own seed.

    A prompt that stands twice in a step (one that spans two epochs) gets further sample indices, so
    that no two samples of a step share seed and name; they form one larger group.

    Args:
        before: samples of earlier rounds of the step.
    """
    seen = Counter(rollout.prompt.uid for rollout in before)
    requests = []
    for prompt in prompts:
        first = seen[prompt.uid]
        seen[prompt.uid] += samples_per_prompt
        requests += [
            SampleRequest(
                prompt=prompt,
                sample_index=index,
                step=step,
                seed=sample_seed(seed, step, prompt.uid, index),
            )
            for index in range(first, first + samples_per_prompt)
        ]
    return requests
