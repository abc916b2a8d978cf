"""mini-swe-agent: how it is started without a terminal (measured on 2.4.6; its import takes some 13 s when cold).

Invariant: its libraries are on its own path alone; the commands that it runs see the task's Python as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

from gyre.executions.harnesses import LaunchRequest
from gyre.executions.harnesses.install import INSIDE, PYTHON
from gyre.executions.harnesses.packaged import Packaged
from gyre.executions.transcripts import Told, files_in, text_of

_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'mini'; sys.dont_write_bytecode = True; "
    "runpy.run_module('minisweagent.run.mini', run_name='__main__')"
)
TRAJECTORY = "/logs/agent/mini-swe-agent.traj.json"


class MiniSweAgentHarness(Packaged):
    """See `Harness`."""

    name = "mini-swe-agent"
    dialect = "openai-chat"

    def argv(self, request: LaunchRequest, folder: Path) -> tuple[str, ...]:
        configs = ["mini.yaml", f"agent.step_limit={request.max_turns}"]
        if request.max_tokens:
            configs.append(f"model.model_kwargs.max_tokens={request.max_tokens}")
        free = ("--yolo", "--exit-immediately", "--cost-limit", "0")
        options = (*free, "-m", f"openai/{request.model}", "-o", TRAJECTORY)
        chosen = [word for config in configs for word in ("-c", config)]
        return (PYTHON, "-I", "-c", _RUN, INSIDE, *options, *chosen, "-t", request.task.instruction)

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        url = f"http://127.0.0.1:{request.port}/v1"
        return {
            "OPENAI_API_BASE": url,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": request.key,
            # Prices would come from the network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
        }

    def transcript(self, snapshot: Path, log: Path) -> Told | None:
        """Its trajectory: a count of calls, and each response with its usage, also where it dropped the reply."""
        for path in files_in(snapshot, TRAJECTORY.lstrip("/")):
            told = json.loads(text_of(path))
            replies = [m["extra"]["response"] for m in told["messages"] if "response" in m.get("extra", {})]
            tokens = sum(int(reply["usage"]["completion_tokens"]) for reply in replies)
            return Told(calls=int(told["info"]["model_stats"]["api_calls"]), tokens=tokens)
        return None
