"""`gyre doctor slurm` and `gyre doctor ledger`: what they make of two versions of Slurm, and of the test cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gyre.launch.slurm_doctor import judge_config, judge_partitions, parse_config, parse_partitions
from tests.slurm.cluster import Cluster

DEBIAN_12 = """\
Configuration data as of 2026-11-29T22:14:45
AccountingStorageType   = accounting_storage/none
JobRequeue              = 1
MinJobAge               = 300 sec
PreemptMode             = OFF
PreemptType             = preempt/none
ProctrackType           = proctrack/cgroup
SchedulerParameters     = (null)
SchedulerType           = sched/backfill
SlurmctldParameters     = (null)
SLURM_VERSION           = 22.05.8
"""
DEBIAN_13 = """\
Configuration data as of 2026-11-29T22:14:45
AccountingStorageType   = (null)
JobRequeue              = 1
MinJobAge               = 300 sec
PreemptMode             = OFF
PreemptType             = (null)
ProctrackType           = proctrack/cgroup
SchedulerParameters     = (null)
SchedulerType           = sched/backfill
SlurmctldParameters     = (null)
SLURM_VERSION           = 24.11.5
"""
"""Plugins that do nothing have no names any more."""
SPOT = {
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
    "SlurmctldParameters": "enable_configless,preempt_send_user_signal",
}


def verdicts(text: str, **changes: str) -> list[str]:
    return [finding.line() for finding in judge_config({**parse_config(text), **changes})]


@pytest.mark.parametrize(("text", "version"), [(DEBIAN_12, "22.05.8"), (DEBIAN_13, "24.11.5")])
def test_both_versions_are_read_alike(text: str, version: str) -> None:
    assert verdicts(text) == [
        f"ok       Slurm {version}: heterogeneous jobs, overlapping steps",
        "ok       backfill every 30 s: a run starts within about that once its nodes are free",
        "ok       jobs may be requeued",
        "ok       no preemption",
        "warning  no accounting: a job is forgotten 300 sec after its end; a run's ledger still knows",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"SLURM_VERSION": "20.02.1"}, "failure  Slurm 20.02.1: steps that overlap need 20.11 or newer"),
        ({"SchedulerType": "sched/builtin"}, "failure  SchedulerType is sched/builtin"),
        ({"SchedulerParameters": "defer,bf_interval=300"}, "warning  backfill every 300 s"),
        ({"JobRequeue": "0"}, "warning  JobRequeue is 0"),
        (SPOT, "ok       preemption (REQUEUE) is announced by the signal before the end"),
        ({**SPOT, "SlurmctldParameters": "(null)"}, "warning  preemption (REQUEUE) comes without the signal"),
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "ok       accounting: accounting_storage/slurmdbd"),
        ({"ProctrackType": "proctrack/linuxproc"}, "warning  ProctrackType is proctrack/linuxproc"),
    ],
)
def test_each_setting_has_its_finding(changes: dict[str, str], line: str) -> None:
    for text in (DEBIAN_12, DEBIAN_13):
        assert any(found.startswith(line) for found in verdicts(text, **changes)), verdicts(text, **changes)


def test_partitions() -> None:
    found = parse_partitions(
        "cpu|up|infinite|2|(null)\ngpu|up|2-00:00:00|4|gpu:4\nold|down|1:00|4|(null)\none|up|1:00|1|\n"
    )
    assert [finding.line().partition(":")[0] for finding in judge_partitions(found)] == [
        "ok       partition cpu",
        "ok       partition gpu",
        "warning  partition old",
        "warning  partition one",
    ]
    assert [finding.verdict for finding in judge_partitions([])] == ["failure"]


@pytest.mark.slow
def test_on_the_test_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """From one node to another one, as on a login node: lines go there and back through the folder."""
    gyre = [sys.executable, "-m", "gyre.cli.main", "doctor"]
    slurm = cluster.on("cpu1", *gyre, "slurm")
    assert "ok       backfill every 1 s" in slurm
    assert "ok       preemption (REQUEUE) is announced by the signal before the end" in slurm
    assert "ok       partition gpu: 4 nodes, limit infinite, gpu:4" in slurm
    ledger = cluster.on("cpu1", *gyre, "ledger", str(tmp_path / "runs"), "--partition", "gpu")
    verdicts = [line.split(maxsplit=1) for line in ledger.splitlines()]
    assert [verdict for verdict, _ in verdicts if verdict == "failure"] == []
    assert any(what.startswith("an appended line is seen by a compute node after ") for _, what in verdicts), ledger
    assert list((tmp_path / "runs").iterdir()) == []
