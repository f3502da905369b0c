"""Rewards from verifiers: exact answers, regular expressions, Python functions, in killable processes."""

import logging
import queue
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import numpy as np

from hpc_rlhf.config import RewardConfig
from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.scoring.sandbox import VerifierFailure, VerifierProcess, VerifierTimeout
from hpc_rlhf.types import Rollout, Scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HANGING = 8  # samples of each worker, one after the other
logger = logging.getLogger(__name__)


def make_verifier(config: RewardConfig, tokenizer: "PreTrainedTokenizerBase") -> "VerifierPool":
    """The verifier that ``reward`` configures; its processes start with the first batch."""
    return VerifierPool(config, tokenizer)


def check_reward(config: RewardConfig) -> None:
    """Make the configured rule in a verifier process, as training will.

    Raises:
        UserError: it cannot be made; the message says why.
    """
    process = VerifierProcess(config)
    try:
        process.start()
    except ComponentError as error:  # its module ended the process, or never finished importing
        raise UserError(f"reward.function={config.function}: {error}") from error
    finally:
        process.close()


class VerifierPool:
    """``reward.workers`` verifier processes, each scoring one sample at a time."""

    def __init__(self, config: RewardConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._processes = [VerifierProcess(config) for _ in range(config.workers)]
        self._free: queue.SimpleQueue[VerifierProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        # Long-lived threads, because a verifier process dies with the thread that started it.
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="verifier")

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """Score every rollout; one whose verifier failed is excluded, which is not a zero.

        Completions are decoded without special tokens; one cut by the length limit is scored too.

        Raises:
            ComponentError: more than ``max_failure_fraction`` of the batch failed; names the
                commonest reason. Or so many took too long, one after the other, that the rest is
                not waited for.
        """
        ids = [rollout.completion.token_ids.tolist() for rollout in rollouts]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        futures = [
            self._threads.submit(self._score_one, rollout, text)
            for rollout, text in zip(rollouts, texts, strict=True)
        ]
        try:
            self._watch(futures)
        finally:
            for future in futures:
                future.cancel()
        results = [future.result() for future in futures]
        excluded = {
            i: str(result)
            for i, result in enumerate(results)
            if isinstance(result, VerifierFailure)
        }
        if excluded:
            reason, count = Counter(excluded.values()).most_common(1)[0]
            failed = f"verifiers failed on {len(excluded)} of {len(rollouts)} samples"
            commonest = f"{count} of them: {reason}"
            allowed = self._config.max_failure_fraction
            if len(excluded) > allowed * len(rollouts):
                raise ComponentError(
                    f"scoring: {failed}, more than reward.max_failure_fraction={allowed:g}; {commonest}"
                )
            logger.warning(
                "step %d: %s, which are excluded; %s", rollouts[0].step, failed, commonest
            )
        rewards = [r if isinstance(r, float) else float("nan") for r in results]
        return Scores(rewards=np.array(rewards, np.float32), excluded=excluded)

    def _watch(self, futures: "Sequence[Future[float | VerifierFailure]]") -> None:
        """Wait for all of them, but not for a reward that only ever hangs: one by one that takes hours.

        Raises:
            ComponentError: see :meth:`score`.
        """
        late = in_a_row = 0
        for future in as_completed(futures):
            if not isinstance(future.result(), VerifierTimeout):
                in_a_row = 0
                continue
            late, in_a_row = late + 1, in_a_row + 1
            too_many = late > self._config.max_failure_fraction * len(futures)
            if too_many or in_a_row >= _HANGING * self._config.workers:
                reward = self._config.function or f"reward.name={self._config.name}"
                raise ComponentError(
                    f"scoring: {reward} hangs: no reward within reward.timeout_s="
                    f"{self._config.timeout_s:g} for {late} of {len(futures)} samples, {in_a_row} of them "
                    "one after the other; the others were not waited for. See what it waits for, or "
                    "raise reward.timeout_s"
                )

    def _score_one(self, rollout: Rollout, text: str) -> float | VerifierFailure:
        process = self._free.get_nowait()  # as many processes as threads
        try:
            return process.score(text, rollout.prompt.answer, dict(rollout.prompt.fields))
        except VerifierFailure as failure:
            return failure
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the verifier processes, after the samples under way: at most ``timeout_s``."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()
