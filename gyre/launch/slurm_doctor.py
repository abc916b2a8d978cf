"""`gyre doctor slurm`: is this cluster's Slurm set up for runs?

Invariant: it only asks (scontrol, sinfo, sacct); what is made of the answers is pure.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gyre.launch.findings import Finding, failure, ok, warning
from gyre.launch.slurm_queue import SlurmSilent, command

COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
OLDEST = (20, 11)
"""srun --overlap, on which each process being a step of its own rests."""
SLOW_BACKFILL = 60
NOTHING = "(null)"
"""What Slurm prints for a setting without a value: newer versions also for plugins that do nothing."""
PARTITION_FORMAT = "%R|%a|%l|%D|%G"


@dataclass(frozen=True)
class Partition:
    name: str
    up: bool
    limit: str
    nodes: int
    gres: str


def examine() -> list[Finding]:
    """Ask this cluster. The first failure to answer ends it."""
    missing = [name for name in COMMANDS if not shutil.which(name)]
    if missing:
        return [failure(f"no {missing[0]} here", "run this on a login node, or load the site's Slurm module")]
    try:
        config = parse_config(command("scontrol", "show", "config"))
        partitions = parse_partitions(command("sinfo", "-h", "-o", PARTITION_FORMAT))
    except SlurmSilent as error:
        return [failure("slurmctld does not answer", str(error))]
    return [*judge_config(config), *judge_partitions(partitions)]


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: Name = value lines."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def parse_partitions(text: str) -> list[Partition]:
    """Lines of PARTITION_FORMAT: sinfo gives one for each kind of node in a partition."""
    found = []
    for line in sorted(set(text.splitlines())):
        name, availability, limit, nodes, gres = line.split("|")
        found.append(Partition(name, availability == "up", limit, int(nodes), "" if gres == "(null)" else gres))
    return found


def judge_config(config: Mapping[str, str]) -> Iterator[Finding]:
    yield _version(config.get("SLURM_VERSION", ""))
    if "backfill" not in config.get("SchedulerType", ""):
        yield failure(
            f"SchedulerType is {config.get('SchedulerType')}",
            "heterogeneous jobs are started by sched/backfill alone: ask the site's administrators",
        )
    else:
        yield _backfill(config.get("SchedulerParameters", ""))
    yield _requeue(config)
    yield _preemption(config)
    if config.get("AccountingStorageType", NOTHING).endswith(("/none", NOTHING)):
        yield warning(
            "no accounting",
            f"a job is forgotten {config.get('MinJobAge', '300 sec')} after its end; a run's ledger still knows",
        )
    else:
        yield ok(f"accounting: {config['AccountingStorageType']}")
    if "linuxproc" in config.get("ProctrackType", "") or "pgid" in config.get("ProctrackType", ""):
        yield warning(
            f"ProctrackType is {config['ProctrackType']}", "proctrack/cgroup leaves nothing of a step that is killed"
        )


def _version(text: str) -> Finding:
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if numbers and numbers < OLDEST:
        return failure(f"Slurm {text}", "steps that overlap need 20.11 or newer")
    return ok(f"Slurm {text or 'of unknown version'}: heterogeneous jobs, overlapping steps")


def _backfill(parameters: str) -> Finding:
    found = re.search(r"bf_interval=(\d+)", parameters)
    seconds = int(found[1]) if found else 30
    text = f"backfill every {seconds} s"
    if seconds > SLOW_BACKFILL:
        return warning(text, "a run starts, and goes on after a requeue, only then; bf_interval sets it")
    return ok(f"{text}: a run starts within about that once its nodes are free")


def _requeue(config: Mapping[str, str]) -> Finding:
    if config.get("JobRequeue") == "0":
        return warning(
            "JobRequeue is 0", "the script asks for --requeue; if the site refuses that, gyre resume goes on"
        )
    return ok("jobs may be requeued")


def _preemption(config: Mapping[str, str]) -> Finding:
    kind, mode = config.get("PreemptType", NOTHING), config.get("PreemptMode", "OFF")
    if kind in (NOTHING, "preempt/none", "") or mode == "OFF":
        return ok("no preemption")
    if "preempt_send_user_signal" not in config.get("SlurmctldParameters", ""):
        return warning(
            f"preemption ({mode}) comes without the signal before the end",
            "a preempted run resumes as after a crash; SlurmctldParameters=preempt_send_user_signal would warn it",
        )
    return ok(f"preemption ({mode}) is announced by the signal before the end")


def judge_partitions(partitions: list[Partition]) -> Iterator[Finding]:
    if not partitions:
        yield failure("no partitions", "you may use none: ask the site's administrators")
    for partition in partitions:
        what = f"partition {partition.name}: {partition.nodes} nodes, limit {partition.limit}"
        what += f", {partition.gres}" if partition.gres else ""
        if not partition.up:
            yield warning(what, "it is down")
        elif partition.nodes < 2:
            yield warning(what, "a component of one node does not survive the loss of a node")
        else:
            yield ok(what)
