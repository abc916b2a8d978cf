"""Images that are a squashfs: SIFs (Apptainer), in which one lies, and what `enroot import` writes, which is one.

Owns the reading of a SIF's header (version 01, as github.com/apptainer/sif lays it out) and the call of unsquashfs.
Invariant: what comes out holds no device, and no set-user-id bit.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

from gyre.executions.images.unpack import ImageError

SQUASHFS_MAGIC = b"hsqs"
MAGIC = b"SIF_MAGIC\0"
HEADER = struct.Struct("<32s10s3s3s16s8q")
"""Launch line, magic, version, architecture, id; created, modified, free and total descriptors, where descriptors lie
and how long they are, the same of the data."""
DESCRIPTOR = struct.Struct("<i?IIIqqq")
"""Type, used, id, group, link, offset, size, padded size; 544 bytes of times, owners, name and extras follow."""
DESCRIPTOR_BYTES = 585
EXTRA = 201
"""Where a descriptor's extras begin: of a partition, its file system and its use, int32 each."""
PARTITION, SQUASHFS, PRIMARY = 0x4004, 1, 2
MOST_DESCRIPTORS = 1024


def squashfs_offset(path: Path) -> int:
    """Where the squashfs of the root file system begins. Raises ImageError."""
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
        if head.startswith(SQUASHFS_MAGIC):
            return 0
        if len(head) < HEADER.size or HEADER.unpack(head)[1] != MAGIC:
            raise ImageError("it is neither a SIF nor a squashfs")
        count, start = HEADER.unpack(head)[8], HEADER.unpack(head)[9]
        file.seek(start)
        for _ in range(min(count, MOST_DESCRIPTORS)):
            raw = file.read(DESCRIPTOR_BYTES)
            if len(raw) < DESCRIPTOR_BYTES:
                break
            kind, used, _, _, _, offset, _, _ = DESCRIPTOR.unpack_from(raw)
            if used and kind == PARTITION:
                file_system, use = struct.unpack_from("<ii", raw, EXTRA)
                if (file_system, use) == (SQUASHFS, PRIMARY):
                    return int(offset)
    raise ImageError("it has no squashfs partition with a root file system (encrypted images are not covered)")


def unpack_squashed(path: Path, root: Path) -> None:
    """Unpack the root file system of a SIF, or of a plain squashfs, into the empty folder `root`.

    Raises ImageError; OSError.
    """
    program = shutil.which("unsquashfs")
    if program is None:
        raise ImageError(
            "unsquashfs is missing (Debian: apt install squashfs-tools); or unpack it yourself into a folder of that"
            " name: apptainer build --sandbox FOLDER IMAGE"
        )
    words = [program, "-no-xattrs", "-no-progress", "-force", "-offset", str(squashfs_offset(path)), "-d", str(root)]
    done = subprocess.run([*words, str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    # 2: not everything could be made as it was (devices and owners, without root's rights).
    if done.returncode not in (0, 2):
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ImageError(f"unsquashfs failed: {said[-1] if said else done.returncode}")
    tame(root)


def tame(root: Path) -> None:
    """Take set-user-id bits and the entries of /dev away, and make folders writable for us.

    Raises ImageError for devices elsewhere.
    """
    root.chmod(0o755)
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                continue
            if stat.S_ISDIR(mode):
                path.chmod(mode & 0o1777 | 0o700)
            elif stat.S_ISREG(mode):
                path.chmod(mode & 0o777 | 0o400)
            elif path.is_relative_to(root / "dev"):
                path.unlink()
            else:
                raise ImageError(f"{path.relative_to(root)}: devices and pipes are refused")
