"""Settings: dataclasses, the files and flags that fill them, and the rules that they keep.

schema.py      every setting of a run, one dataclass for each section; the text under a field is its --help
learning.py    the sections that belong to algos/: algorithm, correction, filters, shaping, critic, safety
evaluation.py  settings of an evaluation, and the run that they make
presets.py     published methods by name, as settings
load.py        makes one Config from files and flags
given.py       text given for settings: words of the command line, entries of YAML files
layers.py      settings of a preset, and those that another setting implies
parse.py       the text of each setting against its type; parsed by tyro
fields.py      settings as flat dotted names; ConfigError
watch.py       settings that note which of them are read
checks.py      all values together: calls the six below
rules.py       each number by itself
named.py       settings that name a function, built-in or in a user's file
methods.py     settings of a method: advantage, loss, correction, filters, critic
placement.py   which ranks train, sample and score
backends.py    axes of the mesh and each policy backend
engines.py     each engine, adapters included
plan.py        ranks, sequences, tokens and updates of a run, for --dry-run
resume.py      which settings may change on resume
paths.py       paths that a run may write to
dump.py        a Config as YAML, as a dict, as the difference of two; secrets removed
"""
