"""Checks a run's settings and does nothing else: `python -m spmdrl.tools.settings FLAGS`, flags as of spmdrl.train.

WORLD_SIZE says how many ranks there will be. slurm/job.sh calls it before it looks at the nodes.
"""

import sys

from spmdrl.config.load import load_or_exit


def main(argv: list[str] | None = None) -> None:
    """Prints mistakes in the settings as the run would, and exits with 2 if there are any."""
    load_or_exit(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
