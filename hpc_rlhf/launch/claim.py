"""The exclusive claim on a run directory: at most one attempt works on a run, without a daemon.

``RUN/claim/N.json`` are generations, of which the highest is the claim. Taking the claim is making the
next generation with link(2), which is atomic on NFS and Lustre too and of which only one can succeed.
So a dead holder is succeeded as atomically as a free run is taken (removing the dead one's file first
would not be: a slow competitor could remove its successor's). The holder touches its file every
few seconds, and looks for a higher generation: one that was taken for dead ends its attempt.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.fs import DamagedFile, publish_json, read_json
from hpc_rlhf.launch.srun import JobRecord, job_record
from hpc_rlhf.run_dir import RunDir

BEAT_S = 10.0  # between two touches of the claim
STALE_S = 120.0  # a claim untouched for this long may be a dead one's
WATCH_S = 3 * BEAT_S  # ... and is, if nothing touches it while it is watched for this long
ENDING_S = 60.0  # how long a job that is being ended is waited for


@dataclass(frozen=True)
class Holder:
    """Who holds a claim."""

    host: str
    pid: int
    pid_started: int  # clock ticks after boot: with the pid, a process's identity
    pid_namespace: int
    boot_id: str
    since: float  # Unix time, by the holder's clock
    nonce: str
    job_id: str | None = None  # Slurm's, of the leader
    restart_count: int = 0  # of that job: how often it was requeued
    attempt: int | None = None
    released: bool = False

    @classmethod
    def this_process(cls, environ: Mapping[str, str] = os.environ) -> "Holder":
        pid = os.getpid()
        started = process_started(pid)
        assert started is not None
        return cls(
            host=os.uname().nodename,
            pid=pid,
            pid_started=started,
            pid_namespace=_pid_namespace(),
            boot_id=_boot_id(),
            since=time.time(),
            nonce=secrets.token_hex(8),
            job_id=environ.get("SLURM_JOB_ID"),
            restart_count=int(environ.get("SLURM_RESTART_COUNT", "0")),
        )

    def __str__(self) -> str:
        job = f"job {self.job_id}, " if self.job_id else ""
        attempt = f"attempt {self.attempt}, " if self.attempt else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{attempt}{job}pid {self.pid} on {self.host}, since {since}"


class Verdict(Enum):
    ALIVE = "alive"
    ENDING = "ending"  # its job is being ended: processes of it may still write
    DEAD = "dead"
    UNKNOWN = "unknown"  # only its heartbeat can tell


def judge(
    holder: Holder, me: Holder, is_running: Callable[[int, int], bool], job: JobRecord | None
) -> Verdict:
    """Whether a holder still works on the run, by its process and by its job.

    Args:
        me: who asks.
        is_running: whether the process of that id and start time runs here.
        job: what Slurm says of the holder's job; None where it has none, or Slurm does not answer.
    """
    if holder.released:
        return Verdict.DEAD
    here = (holder.host, holder.boot_id, holder.pid_namespace) == (
        me.host,
        me.boot_id,
        me.pid_namespace,
    )
    if here and is_running(holder.pid, holder.pid_started):
        return Verdict.ALIVE
    if holder.job_id is None:
        return Verdict.DEAD if here else Verdict.UNKNOWN
    if holder.job_id == me.job_id and holder.restart_count < me.restart_count:
        return Verdict.DEAD  # ourselves, before the requeue
    if job is None:
        return Verdict.UNKNOWN
    if job.restarts > holder.restart_count or not job.holds_nodes:
        return Verdict.DEAD
    if job.state == "COMPLETING":
        return Verdict.ENDING
    if here:
        # Its supervisor is gone. In a batch job that ends the job; in an interactive allocation, the
        # steps end with their srun.
        return Verdict.DEAD if holder.job_id == me.job_id else Verdict.ENDING
    return Verdict.ALIVE if job.state == "RUNNING" else Verdict.UNKNOWN


class Claim:
    """A claim that this process holds; see :func:`hold`."""

    def __init__(self, directory: Path, generation: int, holder: Holder) -> None:
        self._directory = directory
        self._generation = generation
        self._holder = holder
        self._next_beat = time.monotonic() + BEAT_S

    def name_attempt(self, number: int) -> None:
        """Put the attempt's number into the claim, for people."""
        self._holder = replace(self._holder, attempt=number)
        publish_json(self._path, asdict(self._holder))

    def beat(self) -> Holder | None:
        """Show that the holder lives; cheap, to be called often.

        Returns:
            Who has taken the claim over, None while it is ours. A process that was stopped for
            minutes, or cut off, has lost it and must end its steps at once.

        Raises:
            OSError: the claim could not be touched; others may come to take it for a dead one's.
        """
        if time.monotonic() < self._next_beat:
            return None
        self._next_beat = time.monotonic() + BEAT_S
        newest = _newest(self._directory)
        if newest is not None and newest[0] != self._generation:
            return newest[1]
        os.utime(self._path)  # to the filesystem's time, not to that of this node
        return None

    def release(self) -> None:
        """Let the next one in; the file stays, so that generations only grow."""
        publish_json(self._path, asdict(replace(self._holder, released=True)))

    @property
    def _path(self) -> Path:
        return _file(self._directory, self._generation)


@contextmanager
def hold(run: RunDir) -> Iterator[Claim]:
    """Hold the claim on ``run`` for the time of a ``with`` block.

    Raises:
        UserError: another attempt holds it, and who that is; nothing was written.
    """
    claim = take(run, Holder.this_process())
    try:
        yield claim
    finally:
        # a full disk or a lost filesystem: this process's end releases it as well
        with contextlib.suppress(OSError):
            claim.release()


def take(run: RunDir, me: Holder) -> Claim:
    """Take the claim, at once or after a bounded look at whether its holder lives.

    Raises:
        UserError: another attempt holds it.
    """
    directory = run.claims
    while True:
        newest = _newest(directory)
        if newest is not None:
            _refuse_if_held(run, *newest, me)
        generation = newest[0] + 1 if newest else 1
        directory.mkdir(exist_ok=True)
        if _create(directory, generation, me):
            latest = _newest(directory)
            if latest is not None and latest[1].nonce == me.nonce:
                _remove_older(directory, generation)
                return Claim(directory, generation, me)
            # a higher one was made, and those below it removed, since the look above
            _file(directory, generation).unlink(missing_ok=True)


def check_free(run: RunDir) -> None:
    """Refuse early, before anything is written, what :func:`hold` would refuse.

    Raises:
        UserError: an attempt works on the run.
    """
    newest = _newest(run.claims)
    if newest is not None:
        _refuse_if_held(run, *newest, Holder.this_process())


def _refuse_if_held(run: RunDir, generation: int, holder: Holder, me: Holder) -> None:
    until = time.monotonic() + ENDING_S
    while True:
        job = None
        if holder.job_id is not None and not holder.released:
            with contextlib.suppress(ComponentError):  # no answer: its heartbeat decides
                job = job_record(holder.job_id)
        verdict = judge(holder, me, is_running, job)
        if verdict is Verdict.UNKNOWN:
            path = _file(run.claims, generation)
            verdict = Verdict.DEAD if _is_stale(path) else Verdict.ALIVE
        if verdict is Verdict.DEAD:
            return
        if verdict is Verdict.ALIVE or time.monotonic() > until:
            stop = f"`scancel {holder.job_id}`" if holder.job_id else "Ctrl-C there"
            raise UserError(
                f"{run.path} is being worked on: {holder}. Wait for it, or stop it ({stop}); "
                "two attempts may not write into one run"
            )
        time.sleep(1.0)


def _is_stale(path: Path) -> bool:
    """Whether nobody touches the claim any more.

    Its age is by the filesystem's clock, since those of nodes differ. As some filesystems take the
    time of the node that writes, an old one is watched before it is believed.
    """
    try:
        seen = _modified(path)
        if -WATCH_S < _filesystem_time(path.parent) - seen < STALE_S:
            return False
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            time.sleep(min(1.0, WATCH_S / 3))
            if _modified(path) != seen:
                return False
    except FileNotFoundError:  # succeeded and removed: whoever did that is looked at next
        pass
    return True


def _modified(path: Path) -> float:
    with path.open("rb") as file:  # opening asks an NFS server again, stat alone may not
        return os.fstat(file.fileno()).st_mtime


def _filesystem_time(directory: Path) -> float:
    probe = directory / f".probe.{secrets.token_hex(8)}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _newest(directory: Path) -> tuple[int, Holder] | None:
    while True:
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return None
        generations = [int(n.removesuffix(".json")) for n in names if not n.startswith(".")]
        if not generations:
            return None
        newest = max(generations)
        try:
            return newest, _read_holder(_file(directory, newest))
        except FileNotFoundError:
            continue  # succeeded, and removed, since it was listed


def _read_holder(path: Path) -> Holder:
    """Raises:
    DamagedFile: it is no claim.
    """
    value = read_json(path)
    try:
        return Holder(**value)
    except TypeError as error:
        raise DamagedFile(path, f"not a claim: {error}") from None


def _create(directory: Path, generation: int, holder: Holder) -> bool:
    """Make a generation's file with its content, or not at all; False when it is there."""
    temporary = publish_json(directory / f".{holder.nonce}", asdict(holder))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, _file(directory, generation))
        # Not by what link said: an NFS server's answer may be lost, and the repeated call fails.
        return temporary.stat().st_nlink == 2
    finally:
        temporary.unlink()


def _remove_older(directory: Path, generation: int) -> None:
    for name in os.listdir(directory):
        if not name.startswith(".") and int(name.removesuffix(".json")) < generation:
            (directory / name).unlink(missing_ok=True)


def _file(directory: Path, generation: int) -> Path:
    return directory / f"{generation}.json"


# ------------------------------------------------------------------------------ processes of this node


def process_started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    return process_started(pid) == started


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
