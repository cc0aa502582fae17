"""Settings of a run: their dataclasses, the files and flags that give their values, and the rules that check them.

schema.py        settings of a run of reinforcement learning, and those that all training jobs share; the text under a
                 field is its --help
learning.py      the sections that belong to algos/: algorithm, correction, filters, shaping, critic, safety
evaluation.py    settings of an evaluation
supervised.py    settings that jobs on given rows share; sft.py, preference.py, reward_model.py: those of one such job
online_preference.py  settings of preference learning on the policy's samples
distillation.py  settings of distillation; divergence.py: settings of the divergence from a teacher
presets.py       published methods by name, as settings
builtin.py       a table of the rewards that come with spmdrl
declare.py       declares a setting's default, valid values, the jobs that read it, and whether a resume may change it
fields.py        settings as flat dotted names; ConfigError; lines about settings to change
load.py          makes one Config from files and flags
raw_settings.py  reads the text of settings from the command line and YAML files, and parses it by type
layers.py        values that files and flags override: presets, defaults, and values implied by other settings
use.py           refuses settings that the run does not read
composition.py   facts that follow from the settings of a method: inputs of its functions, meaning of `auto`
parameters.py    finds the settings that fill the parameters of a loss or an advantage
named.py         settings that name a function, built-in or in a user's file
checks.py        checks all values together, mainly by rules of the files below
rules.py         the rules that settings declare, and those that all jobs share
methods.py       rules for a method: advantage, loss, correction, filters, critic
placement.py     numbers of ranks that train, sample and score, and rules for these roles
backends.py      rules for the axes of the mesh and each policy backend
engines.py       facts about the engines and adapters, and rules for them
rewards.py       rewards that settings name, and rules for them and for the sandbox of programs
classifier.py    settings of a reward model that a YAML file describes
judge.py         settings of judges, and their rules
environment.py   settings and limits of environments, and their rules
yaml_file.py     reads the YAML files of judges, reward models and environments
template.py      variables of the chat template for a whole run
user_code.py     imports users' Python files and puts errors of their code on one line
plan.py          numbers of ranks, sequences, tokens and updates of a run, for its first lines and --dry-run
resume.py        compares the settings of a run folder with those of a run that resumes in it
paths.py         paths that a run may write to
dump.py          a Config as YAML or dict, and the differences of two configs; removes secrets
"""
