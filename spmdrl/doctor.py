"""Checks whether a run can start here: see `tools/doctor.py`."""

import sys

if __name__ == "__main__":
    try:
        from spmdrl.tools.doctor import main
    except ModuleNotFoundError as error:
        fix = "./launch/install.sh, then start with its Python, .venv/bin/python"
        sys.exit(f"fail requirements  {sys.executable} has no {error.name}; fix: {fix}")
    main()
