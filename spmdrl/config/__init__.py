"""Settings: dataclasses, the files and flags that fill them, and their rules.

schema.py        every setting of a run, one dataclass for each section; the text under a field is its --help
learning.py      the sections that belong to algos/: algorithm, correction, filters, shaping, critic, safety
evaluation.py    settings of an evaluation
supervised.py    settings that jobs on given rows share; sft.py, preference.py, reward_model.py: each job's own
online_preference.py  settings of preference learning on own samples
distillation.py  settings of distillation; divergence.py: those of the divergence
presets.py       published methods by name, as settings
builtin.py       a table of the rewards that come with spmdrl
declare.py       declares a setting's default, valid values and readers, and whether a resume may change it
fields.py        settings as flat dotted names; ConfigError; lines about settings to change
load.py          makes one Config from files and flags
raw_settings.py  reads the text of settings from the command line and YAML files, and parses it by type
layers.py        settings that files and flags override: presets, defaults, and settings implied by others
use.py           refuses settings that the run does not read
composition.py   facts that follow from the settings of a method: inputs of its functions, values of `auto`
parameters.py    finds the settings that fill the parameters of a loss or an advantage
named.py         settings that name a function, built-in or in a user's file
checks.py        checks all values together by the rules of the files below
rules.py         the rules that settings declare, and those that all jobs share
methods.py       rules for a method: advantage, loss, correction, filters, critic
placement.py     the ranks that train, sample and score, and their rules
backends.py      rules for the axes of the mesh and each policy backend
engines.py       facts of the engines and their rules, adapters included
rewards.py       rewards that settings name, the sandbox of those that run programs, and their rules
classifier.py    settings of a reward model that a YAML file describes
judge.py         settings of judges, and their rules
environment.py   settings of environments with their limits, and their rules
yaml_file.py     reads the YAML files of judges, reward models and environments
template.py      variables of the chat template for a whole run
user_code.py     imports files of users and puts their errors on one line
plan.py          numbers of ranks, sequences, tokens and updates of a run, for --dry-run
resume.py        compares a run folder's settings with a run's
paths.py         paths that a run may write to
dump.py          a Config as YAML or dict, and the difference of two; removes secrets
"""
