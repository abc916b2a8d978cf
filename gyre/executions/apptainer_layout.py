"""What lies where before Apptainer starts: the root file system, /dev, /run and the sources of its binds.

Owns the folders of a sandbox's `scratch`, and the fstab that `mount` works off in the sandbox's first mount namespace.
Invariant: of what an execution can write, nothing is a path of ours: mount points are made in fresh folders and in a
layer of their own, never through the upper folder, where links may lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from gyre.executions import launcher
from gyre.executions.fstab import entry
from gyre.executions.host_python import HOST
from gyre.executions.layers import host_system
from gyre.executions.namespaced import DEVICE_LINKS, DEVICES, LAUNCHER
from gyre.executions.sandbox import Bind, SandboxSpec

GYRE = "/run/gyre"
"""All that gyre shows below /run is shown here: a read-only folder in the sandbox's own /run."""
SCRIPTS = "/.singularity.d"
"""Where Apptainer looks for scripts of the image, which it runs before any program: covered, since an execution's would
come before its grader's launcher. (Its folder `env` must be there: without it, it is /environment that is run.)"""
AWKWARD = ",:\\\n"
"""Characters that an overlay's options cannot name."""


class Layout:
    """The folders and files in one sandbox's `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch.absolute()
        self.root, self.work, self.mount_points, self.devices, self.run, self.gyre, self.sources, self.own = (
            self.scratch / name
            for name in ("root", "work", "mount-points", "dev", "run", "gyre", "sources", "apptainer")
        )
        self.scripts = self.scratch / "scripts"
        self.fstab, self.configuration = self.scratch / "fstab", self.scratch / "apptainer.conf"
        self.thrown_away = self.scratch / "upper"

    def source(self, number: int) -> Path:
        return self.sources / str(number)


def all_binds(spec: SandboxSpec) -> list[Bind]:
    """The task's binds and those that every sandbox has."""
    own = [Bind(Path(launcher.__file__), LAUNCHER), Bind(Layout(spec.scratch).scripts, SCRIPTS)]
    if spec.image:
        return [Bind(Path("/usr"), f"{HOST}/usr"), *own, *spec.binds]
    system = [Bind(Path("/", name), f"/{name}") for name in host_system()]
    return [*system, *own, *spec.binds]


def lay_out(spec: SandboxSpec) -> SandboxSpec:
    """Make the folders of `spec` and write its fstab. Raises OSError."""
    layout = Layout(spec.scratch)
    awkward = [path for path in (layout.scratch, spec.upper) if path and set(AWKWARD) & set(str(path.absolute()))]
    if awkward:
        raise OSError(f"{awkward[0]}: no comma, colon or backslash may be in the path of an apptainer sandbox")
    for folder in (
        layout.root,
        layout.work,
        layout.devices / "shm",
        layout.run,
        layout.gyre,
        layout.own,
        layout.scripts / "env",
    ):
        folder.mkdir(parents=True)
    if spec.upper is None:
        layout.thrown_away.mkdir()
        spec = structs.replace(spec, upper=layout.thrown_away)
    for name in DEVICES:
        (layout.devices / name).touch()
    for name, target in DEVICE_LINKS.items():
        (layout.devices / name).symlink_to(target)
    for name in ("proc", "dev", "run"):
        (layout.mount_points / name).mkdir(parents=True)
    binds = all_binds(spec)
    for number in range(len(binds), len(binds) + len(spec.lowers) + 1):
        layout.source(number).mkdir(parents=True)
    for number, bind in enumerate(binds):
        _place(layout.source(number), bind.source.is_dir())
        if bind.target.startswith(f"{GYRE}/"):
            _place(layout.gyre / bind.target.removeprefix(f"{GYRE}/"), bind.source.is_dir())
        elif bind.target.startswith("/run/"):
            raise OSError(f"{bind.target}: an apptainer sandbox shows nothing of the host below /run but in {GYRE}")
        else:
            _place(layout.mount_points / bind.target.lstrip("/"), bind.source.is_dir())
    layout.fstab.write_text("".join(f"{entry(*line)} 0 0\n" for line in fstab(spec)))
    return spec


def _place(path: Path, folder: bool) -> None:
    (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
    if not folder:
        path.touch()


def fstab(spec: SandboxSpec) -> Iterator[tuple[str, str, str, str]]:
    """What is mounted before Apptainer starts, in order: source, target, type, options (pure)."""
    layout, binds = Layout(spec.scratch), all_binds(spec)
    layers = [*spec.lowers, layout.mount_points]
    for number, lower in enumerate(layers, len(binds)):
        yield str(lower.absolute()), str(layout.source(number)), "none", "bind"
    lowers = ":".join(str(layout.source(number)) for number in reversed(range(len(binds), len(binds) + len(layers))))
    changes = f"upperdir={spec.upper and spec.upper.absolute()},workdir={layout.work}"
    yield "overlay", str(layout.root), "overlay", f"userxattr,lowerdir={lowers},{changes}"
    for number, bind in enumerate(binds):
        yield str(bind.source.absolute()), str(layout.source(number)), "none", "bind"
    for name in DEVICES:
        yield f"/dev/{name}", str(layout.devices / name), "none", "bind"
    size = spec.limits.shared_memory
    yield "tmpfs", str(layout.devices / "shm"), "tmpfs", f"mode=1777,size={size},nosuid,nodev"
    yield "tmpfs", str(layout.run), "tmpfs", f"mode=755,size={size // 16},nosuid,nodev"
    yield str(layout.gyre), str(layout.run / "gyre"), "none", "bind,x-mount.mkdir"


def laid_out(spec: SandboxSpec) -> Iterator[tuple[Path, str, bool]]:
    """What Apptainer binds, in order: source, target, whether it can be written (pure). `fstab` has been mounted."""
    layout = Layout(spec.scratch)
    yield layout.devices, "/dev", False
    yield layout.run, "/run", True
    yield layout.gyre, GYRE, False
    for number, bind in enumerate(all_binds(spec)):
        yield layout.source(number), bind.target, bind.writable
