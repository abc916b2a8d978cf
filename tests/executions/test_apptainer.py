"""The Apptainer sandbox: what is its own beside the conformance suite (test_sandbox.py and others, once a kind)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.errors import UserError
from gyre.executions.apptainer import Apptainer, arguments
from gyre.executions.apptainer_layout import Layout, fstab, lay_out
from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
from gyre.executions.grading import grade
from gyre.executions.harnesses import find_harness
from gyre.executions.layers import private_folder
from gyre.executions.namespaced import check_host
from gyre.executions.sandbox import Bind, ExitStatus, SandboxFailure, make_sandbox
from gyre.executions.tasks import load_task
from gyre.executions.users import User

SORT = Path(__file__).parents[2] / "recipes/tasks/quickstart/sort-01"


@pytest.fixture
def apptainer(lab_of: Any) -> Any:
    return lab_of("apptainer")


def test_no_variable_of_the_task_is_on_its_command_line_or_in_a_file_of_its(lab: Any) -> None:
    spec = lab.spec("true", env={"OPENAI_API_KEY": "geheim"})
    sandbox = Apptainer("/no/program")
    spec = sandbox.lay_out(spec)
    assert "geheim" not in " ".join(arguments("apptainer", spec))
    texts = [path.read_text() for path in spec.scratch.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(texts) > 2 and not any("geheim" in text for text in texts)


def test_any_name_of_a_layer_or_of_a_bound_folder_can_be_mounted(lab: Any) -> None:
    """An overlay's options and Apptainer's words would split them: both see numbers only."""
    source = lab.folder / "a b, c:d\\e"
    source.mkdir()
    spec = lab.spec("true", binds=(Bind(source, "/tests"),))
    spec = msgspec.structs.replace(spec, lowers=(*spec.lowers, source))
    lay_out(spec)
    written = Layout(spec.scratch).fstab.read_text().splitlines()
    assert sum(line.startswith(f"{lab.folder}/a\\040b,\\040c:d\\134e ") for line in written) == 2
    assert all(len(line.split()) == 6 for line in written)
    (overlay,) = [options for kind, _, _, options in fstab(spec) if kind == "overlay"]
    assert ", " not in overlay
    assert not [word for word in arguments("apptainer", spec) if "c:d" in word]


async def test_what_it_does_not_cover_is_one_line(lab: Any, tmp_path: Path) -> None:
    sandbox, task = Apptainer("/no/program"), lab.task()
    with pytest.raises(OSError, match="one user, and task wants 'games'"):
        sandbox.user(lab.root, task, "games")
    assert sandbox.user(lab.root, task, "root") is None
    with pytest.raises(SandboxFailure, match="one user, and this is agent"):
        await sandbox.start(lab.spec("true", user=User(1234, 1234, "agent")))
    with pytest.raises(SandboxFailure, match="no comma, colon or backslash"):
        await sandbox.start(msgspec.structs.replace(lab.spec("true"), scratch=private_folder(tmp_path / "a,b")))
    with pytest.raises(SandboxFailure, match="below /run but in /run/gyre"):
        await sandbox.start(lab.spec("true", binds=(Bind(SORT, "/run/elsewhere"),)))


async def test_a_machine_without_a_working_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "apptainer"
    broken.write_text("#!/bin/sh\necho 'FATAL: no such thing' >&2\nexit 255\n")
    broken.chmod(0o755)
    with pytest.raises(UserError) as caught:
        await check_host(Apptainer(str(broken)), tmp_path / "root")
    assert str(caught.value).startswith("apptainer does not work on this machine (apptainer failed: ")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="apptainer is missing: install Apptainer"):
        await make_sandbox("apptainer", tmp_path)


@pytest.mark.slow
async def test_it_works_here_and_leaves_nothing(apptainer: Any, live: Any, tmp_path: Path) -> None:
    assert (await make_sandbox("apptainer", tmp_path / "root")).kind == "apptainer"
    assert list((tmp_path / "root").iterdir()) == []
    running, spec = await apptainer.start("trap '' TERM; (setsid sleep 100 &); sleep 100; true")
    assert live(str(spec.scratch)) != []
    await running.kill()
    assert live(str(spec.scratch)) == []
    for table in filter(Path.exists, (Path("/proc/self/mountinfo"), Path("/run/mount/utab"))):
        assert str(spec.scratch) not in table.read_text()


@pytest.mark.slow
async def test_a_folder_of_a_lower_layer_can_be_removed_and_made_anew(apptainer: Any) -> None:
    """What Apptainer's own overlay cannot do in a user namespace; the grader sees the new one alone."""
    check = "#!/bin/bash\n[[ -e old/new && ! -e old/Dockerfile && ! -e gone ]] && r=1 || r=0\n"
    task = apptainer.task(
        test_sh=f"{check}echo $r > /logs/verifier/reward.txt\n",
        dockerfile="FROM x\nWORKDIR /app\nCOPY Dockerfile old/\nCOPY Dockerfile gone/\n",
    )
    status, output, snapshot = await apptainer.run("rm -r old gone && mkdir old && touch old/new", task=task)
    assert (status, output) == (ExitStatus(code=0), "")
    result = await grade(
        task, apptainer.sandbox, apptainer.root, snapshot, private_folder(apptainer.folder / "g"), apptainer.limits
    )
    assert result.reward == 1.0, result


@pytest.mark.slow
async def test_what_is_limited_inside(apptainer: Any) -> None:
    command = """df -B1 --output=size /dev/shm /run | tail -n 2
        ls /sys 2>&1; touch /dev/null/x /run/gyre/x 2>&1; unshare -U true 2>&1; exit 0"""
    _, output, _ = await apptainer.run(command)
    size = apptainer.limits.shared_memory
    lines = output.split("\n")
    assert [int(line) for line in lines[:2]] == [size, size // 16]
    assert "cannot access '/sys'" in output
    assert "'/run/gyre/x': Read-only file system" in output
    assert "No space left on device" in output


SCRIPT = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\necho evil\nexit 0\n"
SCRIPTS = ("99-last", "01-base", "90-environment", "99-runtimevars", "inject-apptainer-env")
PLACES = (*(f"env/{name}.sh" for name in SCRIPTS), "actions/exec", "runscript")
BESIDE = ("environment", ".inject-apptainer-env.sh", ".exec", ".run", "singularity", "apptainer")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["layer", "resumed", "a link in the resumed one"])
async def test_no_script_that_lies_where_apptainer_runs_them_is_run(apptainer: Any, how: str) -> None:
    """They would run before the launcher: in the grader's sandbox, beside the tests and with the reward to write."""
    spec = apptainer.spec("find /.singularity.d/; echo ok", resumed=how != "layer")
    layer = private_folder(apptainer.folder / "layer") if how == "layer" else spec.upper
    home = layer / ("app/scripts" if "link" in how else ".singularity.d")
    for path in (*(home / name for name in PLACES), *(layer / name for name in BESIDE)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPT)
        path.chmod(0o755)
    if "link" in how:
        (layer / ".singularity.d").symlink_to("/app/scripts")
    if how == "layer":
        spec = msgspec.structs.replace(spec, lowers=(*spec.lowers, layer))
    running = await apptainer.sandbox.start(spec)
    assert await running.wait(60) == ExitStatus(code=0)
    await running.kill()
    assert spec.log.read_text() == "/.singularity.d/\n/.singularity.d/env\nok\n"


@pytest.mark.slow
async def test_a_recipes_task_from_the_first_call_to_the_reward(apptainer: Any, scripted: Any) -> None:
    task = load_task(SORT)
    model = scripted([(SORT / "solution/solve.sh").read_text(), None])
    limits = Timeouts(harness=120, grader=120, execution=300)
    request = ExecutionRequest(name="e", task=task, key="k", model="m", timeouts=limits)
    result = await run_execution(
        request,
        find_harness("shell"),
        apptainer.sandbox,
        apptainer.root,
        model.serve,
        lambda: CallReport(len(model.requests)),
    )
    model.close()
    assert (result.outcome, result.reward, result.model_calls) == ("graded", 1.0, 2), result
