"""Compares the flight records of a failed run: see `tools/flight.py`."""

from spmdrl.tools.flight import main

if __name__ == "__main__":
    main()
