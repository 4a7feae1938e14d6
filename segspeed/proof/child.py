"""One run in a process of its own: python -m segspeed.proof.child JOB.json

``JOB.json`` holds a whole configuration, and whether only the throughput is asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from segspeed.config import Config
from segspeed.jsonio import write_json
from segspeed.types import DataError, RunStopped


def main(path: Path) -> int:
    """Train, or measure, what the job says; a result that is no run's stands beside the job as ``JOB.result.json``."""
    from segspeed.proof.throughput import throughput
    from segspeed.training import train

    job: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cfg = Config.model_validate(job["config"])
    try:
        if job["quick"]:
            write_json(path.with_suffix(".result.json"), throughput(cfg))
        else:
            train(cfg)
    except (DataError, RunStopped) as error:
        print(error, file=sys.stderr, flush=True)
        path.with_suffix(".error.txt").write_text(str(error), encoding="utf-8")
        return error.exit_code if isinstance(error, RunStopped) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
