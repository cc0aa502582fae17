"""Becomes the program of its arguments: `Job` starts modules, and a launcher is a script."""

import os
import sys

os.execv(sys.argv[1], sys.argv[1:])
