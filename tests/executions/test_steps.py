"""Tasks of several steps: what each session sees, how each step's end counts, and how the rewards become one."""

from __future__ import annotations

import asyncio
import math
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from gyre.errors import UserError
from gyre.executions.check import check_task
from gyre.executions.execution import CallReport, ExecutionRequest, ExecutionResult, run_execution
from gyre.executions.harnesses import Launch, LaunchRequest, find_harness
from gyre.executions.process_sandbox import ProcessSandbox
from gyre.executions.steps import below, combined
from gyre.executions.tasks import Task, load_task
from gyre.launch.submit import refuse_long
from gyre.recipe import schema
from tests.executions.test_execution import SECRET, TIMES

STOCK = Path(__file__).parents[2] / "recipes/tasks/several-steps/stock-count"
COUNT, DELIVERY = "wc -l < stock.txt > count.txt", "cat delivery.txt >> stock.txt; wc -l < stock.txt > count.txt"
GRADE = (
    "#!/bin/bash\n# GRADER-MARK\necho graded >> out.txt; mkdir -p /logs/agent/grader; cat {0} > /logs/verifier/{1}\n"
)
FULL_STEPS = (
    {
        "one": "artifacts = ['b']\nmin_reward = { a = 0.5 }\n[steps.agent]\ntimeout_sec = 9\n"
        "[steps.verifier]\nenv = { B = '2' }\nenvironment_mode = 'shared'\n",
        "two": "min_reward = 1\n[steps.healthcheck]\ncommand = 'x'\nretries = 5\n",
    },
    "multi_step_reward_strategy = 'final'\nartifacts = ['a']\n[agent]\ntimeout_sec = 7\n"
    "[verifier]\nenv = { A = '1', B = '1' }\ntimeout_sec = 5\nenvironment_mode = 'separate'\n",
)
"""Steps with every key, and the keys of their task."""
NUMBERS = st.dictionaries(st.sampled_from(["reward", "a", "b"]), st.floats(-10, 10), min_size=1)


def made(lab: Any, steps: dict[str, str], more: str = "", **files: str) -> Task:
    return load_task(written(lab, steps, more, **files))


def written(lab: Any, steps: dict[str, str], more: str = "", **files: str) -> Path:
    """A task whose step's grader gives what the agent wrote to `<step>.json`; `steps`: name -> keys of the step."""
    folder = lab.folder / "tasks" / "made"
    shutil.rmtree(folder, ignore_errors=True)
    entries = "".join(f'[[steps]]\nname = "{name}"\n{keys}\n' for name, keys in steps.items())
    texts = {
        "task.toml": f'schema_version = "1.4"\n{more}\n{entries}',
        "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
    }
    for name in steps:
        texts[f"steps/{name}/instruction.md"] = f"Do {name}."
        texts[f"steps/{name}/tests/test.sh"] = GRADE.format(f"{name}.json", "reward.json")
    for path, text in {**texts, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


class ByStep:
    """A harness that is one shell command for each instruction."""

    name, dialect = "by-step", "openai-chat"

    def __init__(self, commands: dict[str, str]) -> None:
        self.commands = commands

    def check(self, version: str) -> str:
        return version

    def prepare(self, request: LaunchRequest) -> Launch:
        word = request.task.instruction.removeprefix("Do ").removesuffix(".")
        return Launch(argv=("bash", "-c", self.commands[word]), env={"KEY": request.key})


async def played(
    lab: Any, model: Any, task: Task, harness: Any, *reports: CallReport, cut: asyncio.Event | None = None, **more: Any
) -> ExecutionResult:
    """`reports`: what the proxy saw of each session, the last one also of those after it."""
    fields = {"name": "e-1.1", "key": SECRET, "model": "tiny", "timeouts": TIMES, "limits": lab.limits, **more}
    seen = iter(reports)
    chosen = ByStep(harness) if isinstance(harness, dict) else harness
    try:
        return await run_execution(
            ExecutionRequest(task=task, **fields),
            chosen,
            lab.sandbox,
            lab.root,
            model.serve,
            lambda: next(seen, reports[-1]),
            cut,
        )
    finally:
        model.close()


def steps_of(result: ExecutionResult) -> list[tuple[str, str, float | None]]:
    return [(step.name, step.reason, step.reward) for step in result.steps]


async def test_one_workspace_and_a_new_session_for_each_step(lab: Any, scripted: Any) -> None:
    model = scripted([COUNT, None, "ls", DELIVERY, None])
    result = await played(lab, model, load_task(STOCK), find_harness("shell"), CallReport(2), CallReport(3))
    assert (result.outcome, result.reason, result.reward, result.model_calls) == ("graded", "finished", 1.0, 5)
    assert steps_of(result) == [("count", "finished", 1.0), ("delivery", "finished", 1.0)]
    assert [step.model_calls for step in result.steps] == [2, 3]
    first, second = model.requests[0]["messages"], model.requests[2]["messages"]
    assert [len(request["messages"]) for request in model.requests] == [2, 4, 2, 4, 6]
    assert "Write the number of lines" in first[-1]["content"]
    assert "A delivery has arrived" in second[-1]["content"]
    assert model.requests[3]["messages"][-1]["content"].split() == ["count.txt", "delivery.txt", "stock.txt"]
    assert model.keys == {SECRET}
    assert list((lab.root / "executions").iterdir()) == []


async def test_a_step_below_its_least_reward_is_the_last_one(lab: Any, scripted: Any) -> None:
    model = scripted(["echo 4 > count.txt", None])
    result = await played(lab, model, load_task(STOCK), find_harness("shell"), CallReport(2))
    assert (result.outcome, result.reward, steps_of(result)) == ("graded", 0.0, [("count", "finished", 0.0)])


async def test_the_process_sandbox_goes_on_in_the_same_folder(lab: Any, scripted: Any) -> None:
    lab.sandbox = ProcessSandbox()
    model = scripted([COUNT, None, DELIVERY, None])
    result = await played(lab, model, load_task(STOCK), find_harness("shell"), CallReport(2))
    assert (result.reward, steps_of(result)[1]) == (1.0, ("delivery", "finished", 1.0)), result


TWO = {"one": "", "two": ""}
GOOD = "echo '{{\"reward\": {0}}}' > {1}.json"


def does(one: str, two: str = "") -> dict[str, str]:
    return {"one": one, "two": two}


async def test_no_step_sees_graders_or_other_steps_and_forged_rewards_count_for_none(lab: Any, scripted: Any) -> None:
    look = "ls -d /tests/* /solution /logs/*; grep -rsl GRADER'-'MARK / --exclude-dir={proc,usr,dev}"
    forge = "mkdir -p /logs/verifier /tests; echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo > /tests/test.sh"
    commands = does(
        f"{GOOD.format(0.25, 'one')}; {forge}; touch /logs/agent/mine; rm seed",
        f"ls /app /logs/agent /logs/verifier > seen; ({look}) &> looked; {GOOD.format(0.5, 'two')}; {forge}",
    )
    more = {"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY Dockerfile seed\n"}
    result = await played(lab, scripted([]), made(lab, TWO, **more), commands, CallReport(1), keep="all")
    assert (result.reward, [step.reward for step in result.steps]) == (0.375, [0.25, 0.5])
    assert result.workspace is not None
    app = result.workspace / "snapshot/app"
    # What the first session left is there but for its logs; what its grader did (out.txt, /logs/agent/grader) is not.
    assert (app / "seen").read_text().split() == [
        "/app:",
        "one.json",
        "seen",
        "/logs/agent:",
        "/logs/verifier:",
        "reward.json",
    ]
    missing = "ls: cannot access '/solution': No such file or directory"
    assert (app / "looked").read_text().splitlines() == [missing, "/logs/agent", "/logs/verifier", "/tests/test.sh"]


@pytest.mark.parametrize(
    ("one", "reports", "expected"),
    [
        ("sleep 60", [CallReport(1)], ("graded", "harness_timeout", 0.5, ["harness_timeout", "finished"])),
        ("exit 3", [CallReport(1)], ("graded", "harness_failed", 0.5, ["harness_failed", "finished"])),
        ("exit 3", [CallReport(1, True)], ("retry", "server_error", None, ["server_error"])),
        ("true", [CallReport(1, True), CallReport(1)], ("graded", "finished", 0.5, ["finished", "finished"])),
        ("true", [CallReport(0)], ("excluded", "no_model_call", None, ["no_model_call"])),
        ("true", [CallReport(1), CallReport(0)], ("excluded", "no_model_call", None, ["finished", "no_model_call"])),
        ("rm one.json", [CallReport(1)], ("excluded", "grader_failed", None, ["grader_failed"])),
        ("echo nan > one.json", [CallReport(1)], ("excluded", "grader_failed", None, ["grader_failed"])),
    ],
)
async def test_each_steps_end_counts_by_the_table(
    lab: Any, scripted: Any, one: str, reports: list[CallReport], expected: tuple[Any, ...]
) -> None:
    keys = "[steps.agent]\ntimeout_sec = 1.5\n" if one == "sleep 60" else ""
    dockerfile = "FROM x\nWORKDIR /app\nCOPY one.json one.json\n"
    files = {"environment/one.json": '{"reward": 0}', "environment/Dockerfile": dockerfile}
    task = made(lab, {"one": keys, "two": ""}, **files)
    commands = does(one, GOOD.format(1, "two"))
    result = await played(lab, scripted([]), task, commands, *reports, grader_attempts=1)
    assert (result.outcome, result.reason, result.reward, [s.reason for s in result.steps]) == expected
    assert result.exit.timed_out == (expected[1] == "harness_timeout")
    if result.outcome != "graded":
        assert result.detail.startswith(f"step {result.steps[-1].name}")


async def test_a_failure_in_the_last_step_is_no_reward_of_the_first(lab: Any, scripted: Any) -> None:
    result = await played(
        lab, scripted([]), made(lab, TWO), does(GOOD.format(1, "one"), "exit 3"), CallReport(1), grader_attempts=2
    )
    assert (result.outcome, result.reason, result.reward) == ("excluded", "grader_failed", None)
    assert [step.reward for step in result.steps] == [1.0, None]


@pytest.mark.parametrize(
    ("last", "expected"), [(False, ("retry", "interrupted", None)), (True, ("graded", "interrupted", 0.5))]
)
async def test_what_is_cut_before_its_last_step_is_tried_again(
    lab: Any, scripted: Any, last: bool, expected: tuple[Any, ...]
) -> None:
    cut, model = asyncio.Event(), scripted([])
    served = model.serve
    sessions: list[int] = []

    async def serve(listener: Any) -> None:
        sessions.append(1)
        if len(sessions) == 1 + last:
            cut.set()
        await served(listener)

    model.serve = serve
    # Each writes both files first, so that what is cut has a grade.
    both = f"{GOOD.format(1, 'one')}; {GOOD.format(0, 'two')}"
    commands = does(both, f"{GOOD.format(0, 'two')}; sleep 60") if last else does(f"{both}; sleep 60")
    result = await played(lab, model, made(lab, TWO), commands, CallReport(1), cut=cut)
    assert result.interrupted
    assert (result.outcome, result.reason, result.reward) == expected


async def test_the_overall_time_is_of_all_steps_together(lab: Any, scripted: Any) -> None:
    times = msgspec.structs.replace(TIMES, execution=2.0)
    commands = does(GOOD.format(1, "one"), "sleep 60")
    result = await played(lab, scripted([]), made(lab, TWO), commands, CallReport(1), timeouts=times)
    assert (result.outcome, result.reason, result.reward) == ("excluded", "overall_timeout", None)


@pytest.mark.parametrize("fault", ["setup", "healthcheck"])
async def test_a_step_whose_setup_fails_is_the_environments_failure(lab: Any, scripted: Any, fault: str) -> None:
    files = {"steps/two/workdir/setup.sh": "test -f one.json && exit 1", "steps/two/workdir/sub/data": "x"}
    keys = "[steps.healthcheck]\ncommand = 'false'\nretries = 1\n" if fault == "healthcheck" else ""
    task = made(lab, {"one": "", "two": keys}, **(files if fault == "setup" else {}))
    result = await played(lab, scripted([]), task, does(GOOD.format(1, "one"), "true"), CallReport(1), CallReport(0))
    assert (result.outcome, result.reason, result.reward) == ("excluded", "environment_unhealthy", None)


async def test_a_steps_files_replace_what_the_agent_put_in_their_place(lab: Any, scripted: Any) -> None:
    files = {"steps/two/workdir/two.json": '{"reward": 1}', "steps/two/workdir/sub/data": "x"}
    one = f"{GOOD.format(1, 'one')}; echo kept > /victim; ln -s /victim two.json; mkdir sub; touch sub/mine"
    two = "[[ -f sub/data && -f sub/mine && ! -L two.json && $(cat /victim) == kept ]] || rm two.json"
    result = await played(lab, scripted([]), made(lab, TWO, **files), does(one, two), CallReport(1))
    assert result.reward == 1.0, result


async def test_separate_verifiers_and_artifacts_of_a_step(lab: Any, scripted: Any) -> None:
    more = 'artifacts = ["one.json"]\n[verifier]\nenvironment_mode = "separate"\n'
    steps = {"one": "", "two": 'artifacts = ["two.json"]\n'}
    test = "ls *.json | wc -l > /logs/verifier/reward.txt"
    files = {f"steps/{name}/tests/test.sh": test for name in steps}
    result = await played(
        lab,
        scripted([]),
        made(lab, steps, more, **files),
        does("touch one.json two.json", "touch three.json"),
        CallReport(1),
    )
    assert [step.reward for step in result.steps] == [1.0, 2.0]


async def test_another_user_than_root_goes_on_with_its_files(lab: Any, scripted: Any) -> None:
    one = f"{GOOD.format(1, 'one')}; id -u > who; touch /tmp/mine /logs/agent/mine; mkdir /logs/agent/more"
    two = f"[[ $(cat who)-$(id -u) == 1234-1234 && -f /tmp/mine && ! $(ls /logs/agent) ]] && {GOOD.format(1, 'two')}"
    files = {"steps/two/workdir/setup.sh": "[[ -f who ]] && id -u > setup"}
    task = made(lab, {"one": "", "two": "[steps.verifier]\nuser = 'root'\n"}, "[agent]\nuser = 1234\n", **files)
    assert [step.verifier_user for step in task.steps] == ["", "root"]
    result = await played(lab, scripted([]), task, does(one, two), CallReport(1))
    assert result.reward == 1.0, result


USERS = {
    "one": "",
    "two": "[steps.agent]\nuser = 'root'\n",
    "three": "[steps.agent]\nuser = 4321\n",
    "four": "[steps.agent]\nuser = '4321:0'\n",
    "five": "[steps.agent]\nuser = 1234\nartifacts = []\n",
}
DID = {
    "one": "echo 1 > a; mkdir d; echo d > d/gone; touch /tmp/mine",
    "two": "[[ $(cat a) == 1 ]] && echo 2 > a && rm seed d/gone && echo x > /etc/made && rm /etc/debian_version",
    "three": "[[ $(cat a /etc/made) == $'2\\nx' && ! -e seed && ! -e d/gone && ! -e /etc/debian_version ]] &&"
    " echo 3 >> a && echo back > seed && ! touch /etc/mine && [[ -f /tmp/mine ]]",
    "four": "[[ $(cat a) == $'2\\n3' && $(cat seed) == back ]] && rm -r d && mkdir d && touch d/new",
    "five": "[[ $(ls d) == new && $(cat seed) == back && $(cat /etc/made) == x ]] && mv d e",
}
"""Each step's command: it fails where it does not find what the steps before left."""


async def test_each_step_may_have_a_user_of_its_own(lab: Any, scripted: Any) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nCOPY Dockerfile seed\n"
    seen = "#!/bin/bash\nls /app /app/e 2>/dev/null | xargs > /logs/verifier/seen\n" + GRADE.format("{0}.json", "{1}")
    files = {f"steps/{name}/tests/test.sh": seen.format(name, "reward.json") for name in USERS}
    commands = {
        name: f"[[ $(id -u) == {uid} ]] && {command} && {GOOD.format(1, name)}"
        for (name, command), uid in zip(DID.items(), (1234, 0, 4321, 4321, 1234))
    }
    solved = {f"steps/{name}/solution/solve.sh": commands[name] for name in USERS}
    files |= {"environment/Dockerfile": dockerfile, **solved}
    task = made(lab, USERS, "[agent]\nuser = 1234\n", **files)
    result = await played(lab, scripted([]), task, commands, CallReport(1), keep="all")
    assert [(step.name, step.reward) for step in result.steps] == [(name, 1.0) for name in USERS], result
    assert result.workspace is not None
    seen = (result.workspace / "grading-5/1/verifier/seen").read_text()
    assert seen.strip() == "/app: a e five.json four.json one.json seed three.json two.json /app/e: new"
    check = await check_task(task, lab.sandbox, lab.root, lab.limits)
    assert check.solution == 1.0, check.problems


async def test_a_separate_verifier_gets_the_artifacts_of_steps_with_other_users(lab: Any, scripted: Any) -> None:
    more = 'artifacts = ["one.json", "two.json"]\n[agent]\nuser = 1234\n[verifier]\nenvironment_mode = "separate"\n'
    steps = {"one": "", "two": "[steps.agent]\nuser = 'root'\n"}
    files = {f"steps/{name}/tests/test.sh": "ls *.json | wc -l > /logs/verifier/reward.txt" for name in steps}
    task = made(lab, steps, more, **files)
    result = await played(lab, scripted([]), task, does("touch one.json x", "touch two.json"), CallReport(1))
    assert [step.reward for step in result.steps] == [1.0, 2.0], result


async def test_the_tasks_tests_lie_below_the_steps(lab: Any, scripted: Any) -> None:
    shared = "#!/bin/bash\n. /tests/lib.sh\necho $number > /logs/verifier/reward.txt\n"
    files = {"tests/test.sh": shared, "tests/lib.sh": "number=1", "steps/two/tests/lib.sh": "number=3"}
    task = made(lab, TWO, "multi_step_reward_strategy = 'final'", **files)
    for name in TWO:
        (task.folder / f"steps/{name}/tests/test.sh").unlink()
    result = await played(lab, scripted([]), load_task(task.folder), does("true", "true"), CallReport(1))
    assert ([step.reward for step in result.steps], result.reward) == ([1.0, 3.0], 3.0)


async def test_check_says_what_each_step_earns(lab: Any) -> None:
    check = await check_task(load_task(STOCK), lab.sandbox, lab.root, lab.limits)
    assert (check.solution, check.untouched, check.problems) == (1.0, 0.0, ())
    solve = {"steps/one/solution/solve.sh": GOOD.format(1, "one"), "solution/solve.sh": GOOD.format(0.5, "two")}
    check = await check_task(made(lab, TWO, **solve), lab.sandbox, lab.root, lab.limits)
    assert check.solution == 0.75
    gone = "; processes that an earlier step left running are ended with it"
    assert f"the solution earns 0.75, not 1 (one 1, two 0.5){gone}" in check.problems
    assert any("untouched (step one): grader_failed" in problem for problem in check.problems)
    solve["steps/one/solution/solve.sh"] = GOOD.format(0.5, "one")
    check = await check_task(
        made(lab, {"one": "min_reward = 1", "two": ""}, **solve), lab.sandbox, lab.root, lab.limits
    )
    assert "step one: the solution earns reward 0.5, below min_reward 1: no step follows" in check.problems
    solve = {"steps/one/solution/solve.sh": f"{GOOD.format(1, 'one')}; setsid sleep 600 &>/dev/null &"}
    serves = "[steps.healthcheck]\ncommand = 'cat /proc/*/comm | grep -x sleep'\nretries = 1\n"
    solve["steps/two/solution/solve.sh"] = GOOD.format(1, "two")
    check = await check_task(made(lab, {"one": "", "two": serves}, **solve), lab.sandbox, lab.root, lab.limits)
    assert f"solved (step two): the setup or a healthcheck failed{gone}" in check.problems
    again = {**solve, "steps/two/workdir/setup.sh": "setsid sleep 600 &>/dev/null &"}
    check = await check_task(made(lab, {"one": "", "two": serves}, **again), lab.sandbox, lab.root, lab.limits)
    assert check.solution == 1.0
    check = await check_task(made(lab, TWO), lab.sandbox, lab.root, lab.limits)
    assert "solution/solve.sh is missing: it cannot be shown that the task can be solved" in check.problems


@given(st.lists(NUMBERS, min_size=1, max_size=6), st.sampled_from(["mean", "final"]))
def test_the_reward_is_harbors(ran: list[dict[str, float]], strategy: Any) -> None:
    """By exact fractions: a name's mean over all steps that ran, 0 where it is missing; then "reward", or the mean."""
    names = {name for rewards in ran for name in rewards}
    means = {name: sum(Fraction(rewards.get(name, 0)) for rewards in ran) / len(ran) for name in names}
    chosen = means if strategy == "mean" else {name: Fraction(value) for name, value in ran[-1].items()}
    expected = chosen["reward"] if "reward" in chosen else sum(chosen.values()) / len(chosen)
    assert math.isclose(combined(ran, strategy), expected, rel_tol=1e-12, abs_tol=1e-12)


@given(st.lists(NUMBERS, min_size=1, max_size=6), st.randoms())
def test_the_mean_knows_no_order_and_stays_within_bounds(ran: list[dict[str, float]], random: Any) -> None:
    shuffled = random.sample(ran, len(ran))
    assert combined(ran, "mean") == combined(shuffled, "mean")
    values = [0.0, *(value for rewards in ran for value in rewards.values())]
    assert min(values) <= combined(ran, "mean") <= max(values)
    assert combined([ran[0]] * len(ran), "mean") == pytest.approx(combined([ran[0]], "final"))


@given(NUMBERS, NUMBERS)
def test_a_step_goes_on_when_every_least_reward_is_reached(rewards: dict[str, float], least: dict[str, float]) -> None:
    reached = all(rewards.get(name, -math.inf) >= threshold for name, threshold in least.items())
    assert (below(rewards, least) == "") == reached
    assert below(rewards, {}) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("[steps.agent]\ntimeout_sec = 'soon'", r"step 'one' \(number 1\): Expected .*agent.timeout_sec"),
        ("[steps.agent]\ntimeout_sec = -1", "step 'one': agent.timeout_sec must be a number"),
        ("[steps.verifier]\ntimeout_sec = inf", "step 'one': verifier.timeout_sec must be a number"),
        ("min_reward = nan", "step 'one': min_reward must be a number"),
        ("min_reward = 'much'", r"step 'one' \(number 1\): .*min_reward"),
        ("min_reward = { a = inf }", "step 'one': min_reward must be a number"),
        ("artifacts = ['../x']", "step 'one': artifacts: '../x' must be a path"),
        ("[steps.healthcheck]\ncommand = ''", "step 'one': healthcheck: command is empty"),
        (
            "[steps.verifier]\nenv = { A = '${GYRE_TEST_UNSET}' }",
            "step 'one': verifier.env needs the environment variable",
        ),
        (
            "[steps.agent]\nnetwork_mode = 'allowlist'",
            "step 'one': agent.network_mode = \"allowlist\" .* is not covered",
        ),
        ("[[steps.verifier.collect]]\ncommand = 'x'", r"step 'one': \[\[verifier.collect\]\] .* is not covered"),
        (
            "[steps.verifier]\nenvironment_mode = 'shared'\nenvironment = {}",
            r"\[step 'one': verifier.environment\] with environment_mode = \"shared\" is not covered",
        ),
        ("[steps.verifier.environment]\ngpus = 1", "step 'one': verifier.environment.gpus is not covered"),
        ("[steps.verifier.environment]\nmemory_mb = -1", "step 'one': verifier.environment.memory_mb must be"),
        ("[steps.verifier.environment]\nworkdir = 'x'", "step 'one': verifier.environment.workdir 'x' must be"),
        ("[[steps]]\nname = 'ONE'", "step 'ONE': name must be unique"),
        ("[[steps]]\nname = '../x'", "step '../x': name must be that of one folder"),
        ("[[steps]]\nname = 'nul.txt'", "step 'nul.txt': name must be that of one folder"),
        ("[[steps]]\nname = 'x.'", "step 'x.': name must be that of one folder"),
        ("[[steps]]\nname = 'three'", "step 'three': there is no folder .*steps/three"),
        ("[[steps]]\nmin_reward = 1", r"step None \(number 2\): Object missing required field `name`"),
    ],
)
def test_a_fault_of_a_step_names_the_step(lab: Any, keys: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        made(lab, {"one": keys})
    assert str(caught.value).startswith(str(lab.folder))
    assert "\n" not in str(caught.value)


def test_what_is_missing_of_a_step_or_leads_out_of_the_task(lab: Any) -> None:
    folder = made(lab, TWO).folder / "steps/two"
    (folder / "tests/test.sh").unlink()
    with pytest.raises(UserError, match="steps/two/tests/test.sh: missing, .* step 'two': nothing grades it"):
        load_task(folder.parents[1])
    (folder / "tests/test.sh").touch()
    (folder / "workdir").symlink_to("/etc")
    with pytest.raises(UserError, match="steps/two/workdir: step 'two': leads out of the task's folder"):
        load_task(folder.parents[1])
    (folder / "workdir").unlink()
    (folder / "instruction.md").unlink()
    with pytest.raises(UserError, match="steps/two/instruction.md: not readable"):
        load_task(folder.parents[1])


def test_what_a_step_takes_from_its_task(lab: Any) -> None:
    one, two = made(lab, *FULL_STEPS).steps
    assert (one.agent_timeout, two.agent_timeout) == (9, 7)
    # As in Harbor, a step's grader has 600 s unless the step says otherwise.
    assert (one.verifier_timeout, two.verifier_timeout) == (600, 600)
    assert (one.verifier_env, two.verifier_env) == ({"A": "1", "B": "2"}, {"A": "1", "B": "1"})
    assert (one.artifacts, two.artifacts) == (("a", "b"), ("a",))
    assert (one.min_reward, two.min_reward) == ({"a": 0.5}, {"reward": 1.0})
    assert (one.separate, two.separate) == (False, True)


def test_a_recipe_whose_execution_is_shorter_than_a_tasks_steps_is_refused(lab: Any) -> None:
    task = made(lab, *FULL_STEPS)
    # Harness 9 s and (as the task asks) 7 s, graders twice 2 x 10 s.
    settings = schema.Tasks(
        path="", harness_timeout=60.0, grader_timeout=10.0, grader_attempts=2, execution_timeout=56.0
    )
    refuse_long(settings, task)
    with pytest.raises(
        UserError, match="tasks.execution_timeout: 55s is shorter than the 2 steps of task made, .* 56s"
    ):
        refuse_long(msgspec.structs.replace(settings, execution_timeout=55.0), task)
