"""Mooncake's settings: what is set, what the user may set, and what is refused. No engine is started here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gyre.errors import UserError
from gyre.transfer.doctor import loopback_check
from gyre.transfer.environment import Timeouts, check, rdma_devices, refuse_silent_tcp, variables

TOPOLOGY = '{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_1"], ["mlx5_0"]]}'


def test_tcp_is_forced_only_for_tcp():
    assert variables("tcp", Timeouts())["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in variables("rdma", Timeouts())
    check(variables("tcp", Timeouts()), "tcp")
    check(variables("rdma", Timeouts()), "rdma")
    with pytest.raises(UserError, match="MC_FORCE_TCP"):
        check(variables("tcp", Timeouts()), "rdma")


@pytest.mark.parametrize(("progress", "transfer"), [(5, 5), (0, 5), (6, 5)])
def test_progress_stays_below_transfer(progress, transfer):
    with pytest.raises(UserError, match="progress"):
        variables("tcp", Timeouts(progress=progress, transfer=transfer))


@pytest.mark.parametrize(
    "changes",
    [
        {"MC_TRANSFER_TIMEOUT": "5"},
        {"MC_TCP_STATUS_TIMEOUT_SEC": "30"},
        {"MC_TCP_PROGRESS_TIMEOUT_SEC": "0"},
        {"MC_TRANSFER_TIMEOUT": "soon"},
    ],
)
def test_unsafe_user_settings_are_refused(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        check({**variables("tcp", Timeouts()), **changes}, "tcp")


def test_rdma_needs_devices():
    assert rdma_devices(TOPOLOGY) == {"mlx5_0", "mlx5_1"}
    assert rdma_devices('{"cpu:0": [[], []]}') == rdma_devices("{}") == rdma_devices("") == set()
    refuse_silent_tcp(TOPOLOGY, "", "node-1")
    refuse_silent_tcp(TOPOLOGY, "mlx5_1, mlx5_0", "node-1")
    with pytest.raises(UserError, match="devices mlx5_7.*mlx5_0, mlx5_1"):
        refuse_silent_tcp(TOPOLOGY, "mlx5_0,mlx5_7", "node-1")
    with pytest.raises(UserError, match="node-1 does not show an RDMA device"):
        refuse_silent_tcp("{}", "", "node-1")


def test_import_is_light():
    code = (
        "import gyre.transfer.publish, gyre.transfer.manifest, gyre.transfer.doctor, sys;"
        "sys.exit(any(m.split('.')[0] in ('torch', 'mooncake') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_loopback_check():
    report = loopback_check(nbytes=1 << 20, repeats=2)
    assert (report.protocol, report.nbytes, report.repeats) == ("tcp", 1 << 20, 2)
    assert min(report.transfer, report.verified, report.memcpy) > 0
    with pytest.raises(UserError, match="failed: .*RDMA device"):
        loopback_check(protocol="rdma", nbytes=1, repeats=1)


def test_existing_log_folder_is_refused(tmp_path):
    environment = {**variables("tcp", Timeouts()), "MC_LOG_DIR": str(tmp_path)}
    with pytest.raises(UserError, match="MC_LOG_DIR"):
        check(environment, "tcp")
    check({**environment, "MC_LOG_DIR": str(tmp_path / "absent")}, "tcp")
