"""Settings: dataclasses, the files and flags that fill them, and the rules that they obey.

schema.py      every setting of a run, one dataclass for each section; the text under a field is its --help
learning.py    the sections that belong to algos/: algorithm, correction, filters, shaping, critic, safety
evaluation.py  settings of an evaluation
supervised.py  settings that jobs on given rows share; sft.py, preference.py, reward_model.py: each kind's
online_preference.py  settings of preference learning on own samples
distillation.py  settings of distillation; divergence.py: those of the divergence, and their rules
presets.py     published methods by name, as settings
builtin.py     the rewards that come with spmdrl, a row each
declare.py     how a setting declares its default, its rule, and whether a resume may change it
load.py        makes one Config from files and flags
given.py       the user's text for settings: words of the command line, entries of YAML files
begun.py       settings with which the run of a folder was begun
demo.py        defaults of runs that are not the demo
layers.py      settings of a preset, and settings that another setting implies
parse.py       parses the text of each setting by its type, with tyro
fields.py      settings as flat dotted names; ConfigError
use.py         refuses settings that nothing in the run reads
composition.py  facts of a method that follow from its settings: what its functions need, what `auto` means
checks.py      checks all values together: calls the nine below
rules.py       the rules that settings declare
judge.py       settings of a judge; judging.py: its rules with other settings
classifier.py  settings of a reward model that a file describes
user_code.py   imports files of the user's and puts their errors on one line
yaml_file.py   reads the files of judges and reward models
environment.py  environments that `--env` names, with their limits
template.py    variables of the chat template for a whole run
rewards.py     rewards that settings name, and the sandbox of those that run programs
named.py       settings that name a function, built-in or in a user's file
parameters.py  settings that become parameters of a loss or an advantage
methods.py     settings of a method: advantage, loss, correction, filters, critic
placement.py   which ranks train, sample and score
backends.py    axes of the mesh and each policy backend
engines.py     each engine, adapters included
plan.py        numbers of ranks, sequences, tokens and updates of a run, for --dry-run
resume.py      how a run folder's settings differ from a run's
paths.py       paths that a run may write to
dump.py        a Config as YAML or dict, and the difference of two; secrets removed
"""
