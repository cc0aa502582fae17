"""Run settings: their dataclasses, how files and flags are loaded into them, and the rules that validate them.

schema.py        settings for reinforcement learning, and those shared by all training jobs; the docstring below a field
                 is its --help text
learning.py      the sections that correspond to algos/: algorithm, correction, filters, shaping, critic, safety
evaluation.py    settings for an evaluation
supervised.py    settings shared by jobs that train on a given data set; sft.py, preference.py and reward_model.py
                 each have the settings of one such job
online_preference.py  settings for preference learning on the policy's own samples
distillation.py  settings for distillation
divergence.py    settings for the divergence from a teacher
presets.py       published methods by name, as values for settings
builtin.py       a table of the built-in rewards
declare.py       declares a setting's default, valid values, the jobs that read it, and whether a resume may change it
fields.py        settings by dotted name; ConfigError; collects problems with settings
load.py          builds a Config from files and flags
raw_settings.py  reads raw settings from the command line and YAML files, and parses them by type
layers.py        values that files and flags override: presets, defaults, and values implied by other settings
use.py           refuses settings that would have no effect
composition.py   what the method's settings imply: inputs of its functions, resolution of `auto`
parameters.py    maps the parameters of a loss or an advantage to settings
named.py         settings that name a function, either built-in or in a user's file
checks.py        validates all settings together, mostly with rules from the files below
rules.py         rules declared by individual settings, and rules shared by all jobs
methods.py       rules for a method: advantage, loss, correction, filters, critic
placement.py     number of ranks that train, sample and score, and rules for these roles
backends.py      rules for the mesh axes and for each policy backend
engines.py       properties of the engines and adapters, and rules for them
rewards.py       the configured rewards, and rules for them and for the program sandbox
classifier.py    settings for a reward model described by a YAML file
judge.py         settings for judges, with their rules
environment.py   settings and limits for environments, with their rules
yaml_file.py     reads the YAML files for judges, reward models and environments
template.py      run-wide chat template variables
user_code.py     imports users' Python files, and formats their errors on one line
plan.py          number of ranks, sequences, tokens and updates in a run, printed at startup and by --dry-run
resume.py        compares the settings in a run folder with those of a run that resumes from it
paths.py         the paths that a run writes to
dump.py          converts a Config to YAML or a dict, compares configs, and removes secrets
"""
