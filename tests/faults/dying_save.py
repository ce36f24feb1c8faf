"""Saves checkpoints and dies in the middle of it, once for each line on standard input.

    python -m tests.faults.dying_save FOLDER

A line is {"records": n, "bytes": b} or {"records": n, "operation": k}: a child saves checkpoint number n and is killed
by the kernel when its file would grow past b bytes, or kills itself just before the k-th thing it does to the folder.
The answer is the signal that ended the child, 0 where it came to its end.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch

from worker.checkpoint import FORMAT, CheckpointFolder, Header


def save(folder: Path, records: int) -> None:
    """Checkpoint number `records`: 200 kB that say so everywhere, and a position that goes with it."""
    state = {"records": records, "weights": torch.full((50_000,), float(records))}
    at = [("clicks", 0, records)]
    CheckpointFolder(folder, keep=2).save(state, Header(FORMAT, records, 1, records, at, {"dim": 8}, {}))


def die_at(folder: Path, byte: int | None, operation: int | None) -> None:
    """Arrange for this process's end."""
    if byte is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; the kernel's own answer is to kill
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, resource.RLIM_INFINITY))
    left = [operation or 0]

    def count(_event: str, arguments: tuple[object, ...]) -> None:
        if operation is not None and any(str(folder) in str(argument) for argument in arguments):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)  # is told of every file that Python opens, lists, renames and removes


def main() -> None:
    """One child a line."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        how = json.loads(line)
        if not (child := os.fork()):
            die_at(folder, how.get("bytes"), how.get("operation"))
            save(folder, how["records"])
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
