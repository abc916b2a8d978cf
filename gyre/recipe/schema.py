"""The recipe: everything a user can set, with the vetted setting as its default.

Owns the names and types of the keys. Durations are seconds once loaded (`recipe/units.py` reads "2h", "90s").
Invariant: a recipe that loads is complete and possible; `recipe/check.py` refuses impossible combinations.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = float
"""A duration. In TOML: a number of seconds or a string such as "90s", "10m", "2h"."""


class Model(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str = ""
    """Hugging Face folder. Empty when `build` makes the model at first use."""
    build: str = ""
    """Script (relative to the recipe) that builds the model into the user's cache folder."""
    build_arguments: list[str] = field(default_factory=list)
    """More arguments for the build script."""
    template: Literal["qwen3", "qwen3-coder", "qwen3.5", "llama3"] = "qwen3"
    """Family of the chat template: how tails are rendered and tool calls parsed."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the trained weights; optimizer and gradients are float32."""


class Tasks(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    """Folder of task folders: Harbor's, terminal-bench's, NL2RepoBench's, or of an entry point of `gyre.tasks`."""
    reward: str = ""
    """How the grader's files become a number: `file`, `junit`, `junit-all`, or what an entry point of `gyre.rewards`
    offers; empty: as the task's format says."""
    harness_timeout: Seconds = 7200.0
    """Then the harness is ended, and its workspace graded as it stands."""
    execution_timeout: Seconds = 14400.0
    """Of everything together; then the execution is excluded."""
    grader_timeout: Seconds = 600.0
    """Of one grading."""
    grader_attempts: Positive = 2
    """Gradings that may fail before the execution is excluded."""
    attempts: Positive = 3
    """How often an execution may fail, or lose its worker, before it is excluded. What the end of a job interrupts is
    dispatched again, and does not count."""
    interrupted: Literal["again", "grade"] = "again"
    """What the announced end of a job does to what runs: dispatched again in the next one, or ended in time and graded
    as it stands. Without warning it is dispatched again either way."""


class Harness(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = "shell"
    """`shell` (built in), or what an entry point of `gyre.harnesses` offers."""
    version: str = ""
    """Wanted version; empty: any."""
    max_turns: Positive = 200
    """Calls of one execution, where the harness can be told."""
    max_tokens: Positive = 32768
    """Most tokens sampled in one call."""
    environment: dict[str, str] = field(default_factory=dict)
    """More environment variables of the harness."""


class Sandbox(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: Literal["bubblewrap", "apptainer", "enroot", "process"] = "bubblewrap"
    """`enroot`: NVIDIA's, installed on every node that runs executions (docs/tasks.md). `process` isolates nothing: for
    trusted tasks."""
    images: str = ""
    """Folder of images that tasks lie on: unpacked folders, OCI archives (.tar), .sif, .sqsh; empty: the host's own
    system stands in for each."""
    per_node: Positive = 64
    """Executions that one worker runs at a time."""
    network: Literal["proxy", "none", "host"] = "proxy"
    """`proxy`: no network but the model's."""
    memory_mb: Positive = 4096
    """Resident memory of a sandbox."""
    disk_mb: Positive = 4096
    """What a sandbox may write."""
    processes: Positive = 512
    """Processes of a sandbox."""
    open_files: Positive = 4096
    """Open files of one process."""
    keep_workspaces: Literal["none", "failed", "all"] = "none"
    """Which workspaces stay after grading."""


class Rollout(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: Literal["sglang", "reference"] = "sglang"
    """`reference`: a small engine with SGLang's routes, for CPU."""
    python: str = ""
    """Interpreter of SGLang's own virtual environment; empty: the one that `gyre engine install sglang` makes."""
    arguments: list[str] = field(default_factory=list)
    """More arguments of the engine's server; they win over gyre's."""
    tensor_parallel: Positive = 1
    """Ranks of one engine."""
    engines_per_cell: Natural = 0
    """Engines with which a cell serves; 0: as many as its GPUs carry, and on CPU one."""
    data_parallel: Positive = 1
    """Attention groups among an engine's ranks (SGLang's DP attention)."""
    expert_parallel: Positive = 1
    """Ranks among which a layer's experts are spread."""
    memory_fraction: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of a GPU's memory for weights and KV; 0: SGLang's own choice."""
    context: Positive = 131072
    """Longest sequence, in tokens."""
    store_mb: Natural = 0
    """Host memory that each engine lends to the run's store of KV pages: what one cell has read, another takes over
    at a switch. SGLang's hierarchical cache on Mooncake; 0: no store."""
    weights: Literal["shared", "mooncake"] = "shared"
    """How engines get a trainer's weights: they read `shared` memory of their node; or `mooncake`'s Transfer Engine
    writes into their memory, which may be another node's."""
    executions_per_cell: Positive = 96
    """C_e: executions that a serving cell carries."""
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0
    """Of sampling; top_p is 1 and top_k off, so that log-probabilities are exact."""
    start_timeout: Seconds = 900.0
    """Until an engine answers; then it is ended, and the cell starts again."""
    liveness: Seconds = 120.0
    """An engine that answers no question for this long is ended and started again."""


class Group(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    executions: Annotated[int, Meta(ge=2)] = 16
    """N"""
    groups_per_step: Positive = 16
    """B"""
    min_graded: Annotated[int, Meta(ge=2)] = 2
    """With fewer graded executions a group is void: consumed, not trained."""


class Schedule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Literal["elastic", "colocate", "async"] = "elastic"
    """How cells change roles."""
    steps_per_burst: Positive = 1
    """mu"""
    lead_steps: Natural = 0
    """phi: with 0 and mu = 1 the run is on-policy."""
    max_overtake: Natural = 64
    """Later groups that may be consumed before one that is not ready."""
    training_cells: Positive = 1
    """async only: how many cells train."""
    phase_timeout: Seconds = 600.0
    """Deadline of each phase of a switch; then the cell starts again."""
    cell_restarts: Natural = 20


class Trajectory(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_paths: Positive = 5
    """Paths that are trained of one execution."""
    min_targets: Natural = 1
    """Paths with fewer targets come last."""
    selection: Literal["default", "paper"] = "default"
    """What classes a path: its highest target, or (`paper`) its leaf's role."""
    packing: Literal["paths", "tree"] = "paths"
    """`tree` computes what an execution's paths share once; with context_parallel it falls back to paths."""
    record: list[Literal["wire", "routing"]] = field(default_factory=list)
    """What else is recorded: `routing`, the experts that each token went to (mixtures of experts, without a
    store); not in this version: `wire`."""


class Objective(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Literal["gspo", "grpo", "cispo", "tis"] = "gspo"
    clip: tuple[float, float] = (3e-4, 4e-4)
    """Below and above 1; for `tis` the second bounds the weight."""
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean_std"
    """Baseline within a group."""
    std_floor: Annotated[float, Meta(gt=0.0)] = 1e-4
    """Least standard deviation that divides."""
    difference_limit: Annotated[float, Meta(ge=0.0)] = 0.0
    """The run stops when trainer and engine differ by a larger spread in a step (nats); 0: never."""


class Train(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: Natural
    """Optimizer steps of the run; 0: it only evaluates."""
    learning_rate: Annotated[float, Meta(gt=0.0)] = 1e-6
    warmup_steps: Natural = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up."""
    decay_to: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the learning rate that the last step has, unless it is constant."""
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    gradient_clip: Annotated[float, Meta(gt=0.0)] = 1.0
    tensor_parallel: Positive = 1
    sequence_parallel: bool = False
    """The tensor-parallel ranks also split the sequence, where they do not split the weights."""
    pipeline_parallel: Positive = 1
    expert_parallel: Positive = 1
    """Ranks of a pipeline stage among which whole experts are spread; with 1 tensor-parallel ranks split each."""
    context_parallel: Positive = 1
    """Above 1 is refused: the attention computes whole sequences."""
    data_parallel: Positive = 1
    routing_replay: bool = False
    """Mixture of experts: train with the experts that the engine chose (`trajectory.record = ["routing"]`)."""
    tokens_per_microstep: Positive = 131072
    """Most tokens of one micro-step; not below the context."""
    microsteps_per_grant: Positive = 1
    """Micro-steps of a bundle, for each data-parallel rank and pipeline stage."""
    checkpoint_every: Positive = 1
    """Steps between checkpoints; the last step has one."""
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 2
    """Checkpoints that stay."""

    @property
    def ranks(self) -> int:
        """Trainer ranks of a cell."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def bundle(self) -> int:
        """Micro-steps of a grant: enough that every stage of every replica has work."""
        return self.microsteps_per_grant * self.data_parallel * self.pipeline_parallel


class Eval(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str = ""
    """Folder of held-out tasks, never trained on; empty: no evaluation."""
    every: Positive = 8
    """Bursts between evaluations; one also after the last step."""
    samples: Positive = 1
    """Executions of each held-out task."""


class Cells(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    count: Positive = 2
    """The core and its satellites."""
    nodes_per_cell: Positive = 1
    gpus_per_node: Natural = 8
    """0: on CPU."""


class SlurmComponent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    partition: str = ""
    nodes: Natural = 0
    time: str = ""
    constraint: str = ""
    gres: str = ""
    mem: str = ""
    extra: list[str] = field(default_factory=list)


class Slurm(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    account: str = ""
    qos: str = ""
    reservation: str = ""
    gpu: SlurmComponent = field(default_factory=SlurmComponent)
    cpu: SlurmComponent = field(default_factory=SlurmComponent)
    requeue: bool = True
    signal_before_end: Seconds = 600.0
    prologue: list[str] = field(default_factory=list)
    container: list[str] = field(default_factory=list)
    """Words before the interpreter on every node: `["apptainer", "exec", "--nv", "/shared/gyre.sif"]`."""


class Local(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The supervisor of a run, on one machine or inside a job."""

    workers: Positive = 1
    """Workers of a run on one machine (--local)."""
    restarts: Natural = 20
    """Restarts of one process before the run fails."""
    liveness: Seconds = 30.0
    """A process whose counter stands still for this long is taken for dead."""


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    seed: int = 1
    model: Model
    tasks: Tasks
    harness: Harness = field(default_factory=Harness)
    sandbox: Sandbox = field(default_factory=Sandbox)
    rollout: Rollout = field(default_factory=Rollout)
    group: Group = field(default_factory=Group)
    schedule: Schedule = field(default_factory=Schedule)
    trajectory: Trajectory = field(default_factory=Trajectory)
    objective: Objective = field(default_factory=Objective)
    train: Train
    eval: Eval = field(default_factory=Eval)
    cells: Cells = field(default_factory=Cells)
    slurm: Slurm = field(default_factory=Slurm)
    local: Local = field(default_factory=Local)
