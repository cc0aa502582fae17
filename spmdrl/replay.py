"""Looks at an optimizer step that stood out: see `tools/rerun_step.py`."""

from spmdrl.tools.rerun_step import main

if __name__ == "__main__":
    main()
