"""The run directory: one place that knows the names of its files (see docs/overview.md)."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from hpc_rlhf.fs import publish_text


@dataclass(frozen=True)
class Attempt:
    """One allocation's work on a run: ``RUN/attempts/N``."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def plan(self) -> Path:
        """The :class:`~hpc_rlhf.launch.job_plan.JobPlan` of this attempt, as JSON."""
        return self.path / "plan.json"

    @property
    def endpoints(self) -> Path:
        """Directory of endpoint files: ``learner.json`` (rendezvous), ``sampler-K.json``."""
        return self.path / "endpoints"

    @property
    def failures(self) -> Path:
        """Directory of failure records, one JSON file per failed process."""
        return self.path / "failures"

    @property
    def progress(self) -> Path:
        """``{"step": int, "phase": str, "time": float}``, published by the coordinator."""
        return self.path / "progress.json"

    @property
    def notices(self) -> Path:
        """Lines of the coordinator that the supervisor repeats; see :mod:`hpc_rlhf.observe.notices`."""
        return self.path / "notices.log"

    @property
    def stop(self) -> Path:
        """Why the coordinator asked for the end of the attempt, if nothing else had asked for it."""
        return self.path / "stop.json"

    @property
    def started(self) -> Path:
        """Where and when the attempt began, published by the supervisor."""
        return self.path / "started.json"

    @property
    def startup(self) -> Path:
        """Seconds of its start by part, published by the coordinator with the first token."""
        return self.path / "startup.json"

    @property
    def successor(self) -> Path:
        """The job that was queued to succeed this attempt's, if one was."""
        return self.path / "successor.json"

    @property
    def ended(self) -> Path:
        """Why the attempt ended, published by the supervisor."""
        return self.path / "ended.json"

    def log(self, component: str, rank: int) -> Path:
        """The log of one process: ``learner-3.log``, ``sampler-0.log``."""
        return self.path / "logs" / f"{component}-{rank}.log"

    def make(self) -> "Attempt":
        for directory in (self.endpoints, self.failures, self.path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        return self


@dataclass(frozen=True)
class RunDir:
    """``runs/NAME``: everything that outlives an attempt."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def identity(self) -> Path:
        """``run.json``: identity, frozen models and data sets by sha256, code version."""
        return self.path / "run.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def claims(self) -> Path:
        """Who works on the run; see :mod:`hpc_rlhf.launch.claim`."""
        return self.path / "claim"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def partial_rollout(self) -> Path:
        """What a stop in the middle of a rollout left; see :mod:`hpc_rlhf.rollout.spill`."""
        return self.rollouts / "partial.h5"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def warmup(self) -> Path:
        """The policy after supervised warm-up, a Hugging Face directory (absent without warm-up)."""
        return self.path / "warmup"

    @property
    def policy(self) -> Path:
        """What a complete run learned, a Hugging Face directory; of a reward model, the next."""
        return self.path / "policy"

    @property
    def reward_model(self) -> Path:
        return self.path / "reward_model"

    @property
    def next_job(self) -> Path:
        """The job of the chain's next run, which begins when this run is complete."""
        return self.path / "next_job.json"

    def engine_cache(self, replica: int) -> Path:
        """What a sampler's engine compiled and found out of the model: for its next start."""
        return self.path / "cache" / f"sampler-{replica}"

    @property
    def complete(self) -> Path:
        return self.path / "COMPLETE"

    @property
    def token_file(self) -> Path:
        """The bearer token of the run's servers, mode 0600."""
        return self.path / "token"

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        if not self.attempts.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if p.name.isdigit())

    def new_attempt(self) -> Attempt:
        """Create the next attempt's directory; safe against a concurrent creator (mkdir is atomic)."""
        number = max(self.attempt_numbers(), default=0)
        while True:
            number += 1
            attempt = self.attempt(number)
            try:
                attempt.path.mkdir(parents=True)
            except FileExistsError:
                continue
            return attempt.make()

    def ensure_token(self) -> str:
        """Return the run's bearer token, making it at first use."""
        if not self.token_file.exists():
            publish_text(self.token_file, secrets.token_urlsafe(32), mode=0o600)
        return self.token_file.read_text().strip()
