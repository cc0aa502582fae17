"""Runs the doctor (`tools/doctor_report.py`) if this Python is new enough to import it."""

import sys

from spmdrl.tools.doctor_findings import FAIL, python

if __name__ == "__main__":
    found = python()
    if found.level == FAIL:
        # A Python that is too old cannot import the doctor's other files.
        sys.exit(found.line())
    try:
        from spmdrl.tools.doctor_report import main
    except ModuleNotFoundError as error:
        fix = "./launch/install.sh, then start with its Python, .venv/bin/python"
        sys.exit(f"fail requirements  {sys.executable} has no {error.name}; fix: {fix}")
    main()
